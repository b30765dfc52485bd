// Waits, wake, close, what is kept, and that no descriptor is left behind.
#include <cmath>
#include <filesystem>

#include "ranks.h"

using namespace testing;

namespace {

// Descriptors open in this process; 0 where the system does not say.
size_t num_fds() {
  const std::filesystem::path folder = "/proc/self/fd";
  if (!std::filesystem::exists(folder)) return 0;
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(folder), {}));
}

}  // namespace

TEST(next_returns_when_its_time_is_over) {
  auto ranks = make_ranks(2);
  for (auto& rank : ranks) {
    const double begin = now_s();
    CHECK_EQ(next_name(*rank, 0), "nothing");
    CHECK(now_s() - begin < 1);
    CHECK_EQ(next_name(*rank, 0.05), "nothing");
    CHECK(now_s() - begin >= 0.05 && now_s() - begin < 5);
  }
}

TEST(wake_ends_a_waiting_next) {
  auto ranks = make_ranks(1);
  run_threads({[&] { CHECK_EQ(next_name(*ranks[0], kLong), "nothing"); },
               [&] {
                 std::this_thread::sleep_for(std::chrono::milliseconds(20));
                 ranks[0]->wake();
               }});
}

TEST(wake_ends_the_next_to_come_once) {
  auto ranks = make_ranks(1);
  ranks[0]->submit("a", 0, 1, 1);
  ranks[0]->wake();
  ranks[0]->wake();
  CHECK_EQ(next_name(*ranks[0], kLong), "nothing");
  CHECK_EQ(next_name(*ranks[0], kLong), "a/0");
}

TEST(one_next_at_a_time) {
  auto ranks = make_ranks(1);
  bool refused = false;
  run_threads({[&] { CHECK_EQ(next_name(*ranks[0], kLong), "nothing"); },
               [&] {
                 std::this_thread::sleep_for(std::chrono::milliseconds(50));
                 try {
                   ranks[0]->next(0);
                 } catch (const std::logic_error&) {
                   refused = true;
                 }
                 ranks[0]->wake();
               }});
  CHECK(refused);
}

TEST(close_ends_a_waiting_next_and_is_idempotent) {
  auto ranks = make_ranks(2);
  for (auto& rank : ranks) {
    run_threads({[&] { CHECK_EQ(next_name(*rank, kLong), "nothing"); },
                 [&] {
                   std::this_thread::sleep_for(std::chrono::milliseconds(20));
                   rank->close();
                   rank->close();
                 },
                 [&] { rank->close(); }});
    CHECK_EQ(next_name(*rank, kLong), "nothing");
    CHECK_THROWS(std::invalid_argument, "after close", rank->submit("a", 0, 1, 1));
    rank->poll();
    rank->wake();
    CHECK(!rank->failure());
  }
}

TEST(a_unit_in_flight_may_be_done_after_close) {
  auto ranks = make_ranks(1);
  ranks[0]->submit("a", 0, 5, 1);
  CHECK_EQ(next_name(*ranks[0]), "a/0");
  ranks[0]->close();
  ranks[0]->fail("after the end");
  ranks[0]->done("a", 0);
  CHECK_EQ(ranks[0]->bytes_in_flight(), 0);
}

TEST(the_log_keeps_the_newest_and_counts_all) {
  Scheduler lane({0, 1, 1'000'000, kLong, 4}, {});
  for (int i = 0; i < 10; ++i) lane.submit(std::to_string(i), 0, 1, 1);
  for (int i = 0; i < 10; ++i) lane.next(0);
  CHECK_EQ(order(lane), "6/0 7/0 8/0 9/0");
  CHECK_EQ(lane.total_issued(), 10u);
  for (int i = 0; i < 9; ++i) lane.done(std::to_string(i), 0);
  const auto log = lane.log();
  CHECK(log[2].submit_s <= log[2].issue_s && log[2].issue_s <= log[2].done_s);
  CHECK(std::isnan(log[3].done_s));
}

TEST(no_descriptor_is_left) {
  const size_t before = num_fds();
  for (int round = 0; round < 20; ++round) {
    auto ranks = make_ranks(4);
    if (round % 2) ranks[0]->fail("broken");
    if (round % 3) {
      for (auto& rank : ranks) rank->close();
      CHECK_EQ(num_fds(), before);
    }
  }
  CHECK_EQ(num_fds(), before);
}

TEST(close_delivers_what_a_socket_has_not_taken_yet) {
  constexpr int kRequests = 20'000;
  auto ranks = make_ranks(2);
  const std::string suffix(100, 'x');
  for (int i = 0; i < kRequests; ++i) {
    for (auto& rank : ranks) rank->submit(std::to_string(i) + suffix, 0, 0, 1);
  }
  drain(*ranks[0]);
  run_threads({[&] { ranks[0]->close(); }, [&] { replay(*ranks[1], kRequests); }});
  CHECK(!ranks[1]->failure());
}

TEST(close_gives_up_on_a_peer_that_does_not_read) {
  const Pair pair;
  Scheduler leader({0, 2, 100, 0.1}, std::vector{pair.left});
  for (int i = 0; i < 100; ++i) leader.submit(std::to_string(i) + std::string(9000, 'x'), 0, 0, 1);
  drain(leader);
  const double begin = now_s();
  leader.close();
  CHECK(now_s() - begin >= 0.1 && now_s() - begin < 5);
  ::close(pair.right);
}
