// Followers replay the leader's order, whatever their own order, timing and slices are.
#include <algorithm>
#include <atomic>
#include <numeric>

#include "ranks.h"

using namespace testing;

namespace {

void pause(std::mt19937& random, unsigned one_in) {
  if (random() % one_in == 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
  }
}

void check_equal_orders(const Ranks& ranks) {
  for (const auto& rank : ranks) {
    CHECK(!rank->failure());
    CHECK_EQ(rank->num_queued(), 0u);
    CHECK_EQ(rank->bytes_in_flight(), 0);
    CHECK_EQ(order(*rank), order(*ranks[0]));
  }
}

}  // namespace

TEST(followers_issue_in_the_leaders_order) {
  auto ranks = make_ranks(2);
  for (const char* name : {"a", "b", "c"}) ranks[0]->submit(name, -name[0], 1, 1);
  for (const char* name : {"b", "a", "c"}) ranks[1]->submit(name, 0, 1, 1);
  drain(*ranks[0]);
  drain(*ranks[1]);
  CHECK_EQ(order(*ranks[1]), "c/0 b/0 a/0");
}

TEST(a_follower_waits_for_the_head_and_nothing_overtakes_it) {
  auto ranks = make_ranks(2);
  for (const char* name : {"a", "b"}) ranks[0]->submit(name, 0, 1, 1);
  drain(*ranks[0]);
  ranks[1]->submit("b", 0, 1, 1);
  CHECK_EQ(next_name(*ranks[1]), "nothing");
  run_threads({[&] { CHECK_EQ(next_name(*ranks[1], kLong), "a/0"); },
               [&] { ranks[1]->submit("a", 0, 1, 1); }});
  CHECK_EQ(next_name(*ranks[1]), "b/0");
}

TEST(credit_does_not_hold_followers_up) {
  auto ranks = make_ranks(2, 1);
  for (const char* name : {"a", "b"}) {
    for (auto& rank : ranks) rank->submit(name, 0, 50, 1);
  }
  drain(*ranks[0]);
  CHECK_EQ(next_name(*ranks[1]), "a/0");
  CHECK_EQ(next_name(*ranks[1]), "b/0");
  CHECK_EQ(ranks[1]->bytes_in_flight(), 100);
}

TEST(the_leaders_number_of_slices_counts) {
  auto ranks = make_ranks(3);
  ranks[0]->submit("a", 0, 12, 3);
  ranks[1]->submit("a", 0, 12, 1);
  ranks[2]->submit("a", 0, 30, 7);
  for (auto& rank : ranks) drain(*rank);
  check_equal_orders(ranks);
  CHECK_EQ(order(*ranks[2]), "a/0 a/1 a/2");
  CHECK_EQ(ranks[2]->log()[0].num_bytes, 10);
}

TEST(the_leader_may_be_a_round_ahead_under_the_same_name) {
  auto ranks = make_ranks(2);
  for (int round = 0; round < 3; ++round) {
    ranks[0]->submit("a", 0, 2, 2);
    drain(*ranks[0]);
  }
  for (int round = 0; round < 3; ++round) {
    ranks[1]->submit("a", 0, 2, 2);
    CHECK_EQ(next_name(*ranks[1]), "a/0");
    CHECK_EQ(next_name(*ranks[1]), "a/1");
    CHECK_EQ(next_name(*ranks[1]), "nothing");  // the head is the next round's
    ranks[1]->done("a", 0);
    ranks[1]->done("a", 1);
  }
}

TEST(without_connections_each_rank_goes_by_its_own_priorities) {
  Scheduler lane({1, 2, 100, kLong}, {});
  lane.submit("a", 1, 1, 1);
  lane.submit("b", 0, 1, 1);
  drain(lane);
  CHECK_EQ(order(lane), "b/0 a/0");
}

// Every rank submits the same requests in its own random order and at its own pace, from several
// threads, while one thread issues and another completes.
TEST(random_orders_and_delays_give_identical_logs) {
  constexpr int kRequests = 1500, kSubmitters = 3;
  for (const int64_t num_ranks : {1, 2, 4, 7}) {
    auto ranks = make_ranks(num_ranks, 500);
    std::vector<int> slices(kRequests);
    std::mt19937 shared(7);
    for (int& count : slices) count = shared() % 8 == 0 ? 1 + static_cast<int>(shared() % 5) : 1;
    const auto num_units = static_cast<uint64_t>(std::accumulate(slices.begin(), slices.end(), 0));
    std::atomic<int> num_left{static_cast<int>(num_ranks)};
    std::vector<std::function<void()>> threads;
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      Scheduler& lane = *ranks[static_cast<size_t>(rank)];
      std::vector<int> mine(kRequests);
      std::iota(mine.begin(), mine.end(), 0);
      std::shuffle(mine.begin(), mine.end(), std::mt19937(static_cast<unsigned>(rank)));
      for (int part = 0; part < kSubmitters; ++part) {
        threads.push_back([&lane, &slices, mine, rank, part] {
          std::mt19937 random(static_cast<unsigned>(100 * rank + part));
          for (size_t i = static_cast<size_t>(part); i < mine.size(); i += kSubmitters) {
            const int id = mine[i];
            lane.submit("request." + std::to_string(id), random() % 10, 40 + id % 90,
                        slices[static_cast<size_t>(id)]);
            pause(random, 16);
          }
        });
      }
      threads.push_back([&lane, &num_left, num_units, rank] {
        std::mt19937 random(static_cast<unsigned>(rank));
        std::vector<Unit> in_flight;
        while (lane.total_issued() < num_units) {
          auto unit = lane.next(in_flight.empty() ? kLong : 1e-3);
          CHECK(!lane.failure());
          if (unit) in_flight.push_back(*unit);
          while (!in_flight.empty() && (!unit || random() % 2)) {
            lane.done(in_flight.back().name, in_flight.back().slice_idx);
            in_flight.pop_back();
          }
          pause(random, 32);
        }
        for (const Unit& unit : in_flight) lane.done(unit.name, unit.slice_idx);
        finish(lane, num_left);
      });
    }
    run_threads(threads);
    check_equal_orders(ranks);
  }
}

TEST(a_leader_far_ahead_keeps_back_what_a_socket_does_not_take) {
  constexpr int kRequests = 20'000;
  auto ranks = make_ranks(3);
  const std::string suffix(100, 'x');
  for (int i = 0; i < kRequests; ++i) ranks[0]->submit(std::to_string(i) + suffix, -i, 1, 1);
  drain(*ranks[0]);  // 2.4 MB to each follower, none of it read yet
  for (size_t rank : {1, 2}) {
    for (int i = 0; i < kRequests; ++i) ranks[rank]->submit(std::to_string(i) + suffix, 0, 1, 1);
  }
  std::atomic<int> num_left{2};
  run_threads({[&] { finish(*ranks[0], num_left); },
               [&] {
                 replay(*ranks[1], kRequests);
                 replay(*ranks[2], kRequests);
                 finish(*ranks[1], num_left);
               }});
  check_equal_orders(ranks);
}

// poll(2) goes back to sleep if another thread reads first: that thread has to end the wait.
TEST(an_announcement_that_another_thread_reads_ends_the_wait) {
  constexpr uint64_t kRounds = 300;
  auto ranks = make_ranks(2);
  const double begin = now_s();
  run_threads({[&] { replay(*ranks[1], kRounds); },
               [&] {
                 while (ranks[1]->total_issued() < kRounds) ranks[1]->poll();
               },
               [&] {
                 for (uint64_t round = 0; round < kRounds; ++round) {
                   for (auto& rank : ranks) rank->submit(std::to_string(round), 0, 1, 1);
                   drain(*ranks[0]);
                   while (ranks[1]->total_issued() == round) std::this_thread::yield();
                 }
               }});
  CHECK(now_s() - begin < kLong / 2);
}

TEST(many_threads_submit_complete_and_look) {
  constexpr int kThreads = 6, kEach = 400;
  auto ranks = make_ranks(2, 300);
  std::atomic<int> num_left{2};
  std::vector<std::function<void()>> threads;
  for (auto& rank : ranks) {
    Scheduler& lane = *rank;
    for (int t = 0; t < kThreads; ++t) {
      threads.push_back([&lane, t] {
        for (int i = 0; i < kEach; ++i) {
          lane.submit(std::to_string(t) + "." + std::to_string(i), i % 7, 10, 1);
          if (i % 50 == 0) {
            lane.poll();
            lane.log();
            CHECK(!lane.failure());
            CHECK(lane.bytes_in_flight() >= 0 && lane.num_queued() <= kThreads * kEach);
          }
        }
      });
    }
    threads.push_back([&lane, &num_left] {
      replay(lane, kThreads * kEach);
      finish(lane, num_left);
    });
  }
  run_threads(threads);
  check_equal_orders(ranks);
}
