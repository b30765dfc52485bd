// Failures: each is named, and every rank hears of it.
#include "ranks.h"

using namespace testing;

TEST(announced_and_never_submitted) {
  auto ranks = make_ranks(3, 1000, 0.2);
  for (size_t rank : {0, 1}) ranks[rank]->submit("x", 0, 1, 1);
  for (size_t rank : {0, 1}) drain(*ranks[rank]);
  const double begin = now_s();
  CHECK_EQ(next_name(*ranks[2], kLong), "nothing");  // wakes by itself
  CHECK(now_s() - begin >= 0.15 && now_s() - begin < 5);
  for (auto& rank : ranks) {
    const std::string text = await_failure(*rank);
    CHECK_CONTAINS(text, "2: has not submitted 'x', which rank 0 announced 0.2");
    CHECK_EQ(next_name(*rank, kLong), "nothing");  // at once
  }
}

TEST(submitted_and_never_announced) {
  auto ranks = make_ranks(3, 1000, 0.2);
  ranks[1]->submit("x", 0, 1, 1);
  ranks[1]->submit("y", 0, 1, 1);
  CHECK_EQ(next_name(*ranks[1], kLong), "nothing");
  for (auto& rank : ranks) {
    const std::string text = await_failure(*rank);
    CHECK_CONTAINS(text, "0: has not announced 'x', which rank 1 submitted 0.2");
    CHECK_CONTAINS(text, "rank 0 has not submitted it");
  }
}

TEST(a_submission_starts_the_clock_of_a_next_that_waits) {
  auto ranks = make_ranks(2, 1000, 0.2);
  const double begin = now_s();
  run_threads({[&] { CHECK_EQ(next_name(*ranks[1], kLong), "nothing"); },
               [&] {
                 std::this_thread::sleep_for(std::chrono::milliseconds(50));
                 ranks[1]->submit("x", 0, 1, 1);
               }});
  CHECK(now_s() - begin >= 0.2 && now_s() - begin < 5);
  CHECK_CONTAINS(await_failure(*ranks[1]), "0: has not announced 'x'");
}

TEST(a_poll_that_reads_an_announcement_starts_the_clock_of_a_next_that_waits) {
  auto ranks = make_ranks(2, 1000, 0.2);
  std::vector<std::function<void()>> threads = {
      [&] { CHECK_EQ(next_name(*ranks[1], kLong), "nothing"); },
      [&] {
        ranks[0]->submit("x", 0, 1, 1);
        drain(*ranks[0]);
        while (!ranks[1]->failure()) ranks[1]->poll();
      }};
  run_threads(threads);
  CHECK_CONTAINS(await_failure(*ranks[0]), "1: has not submitted 'x'");
}

TEST(the_clock_of_an_announced_unit_starts_when_it_becomes_the_head) {
  auto ranks = make_ranks(2, 1000, 0.5);
  for (const char* name : {"a", "b"}) ranks[0]->submit(name, 0, 1, 1);
  drain(*ranks[0]);
  for (const char* name : {"a", "b"}) {  // each 0.35 s after it became the head
    CHECK_EQ(next_name(*ranks[1], 0.35), "nothing");
    ranks[1]->submit(name, 0, 1, 1);
    CHECK_EQ(next_name(*ranks[1]), name + std::string("/0"));
  }
  CHECK(!ranks[1]->failure());
}

TEST(progress_restarts_the_clocks) {
  auto ranks = make_ranks(2, 1000, 0.4);
  ranks[1]->submit("last", 0, 1, 1);
  for (int i = 0; i < 6; ++i) {  // 0.6 s in all, never 0.4 s without news
    const std::string name = std::to_string(i);
    for (auto& rank : ranks) rank->submit(name, 0, 1, 1);
    drain(*ranks[0]);
    drain(*ranks[1], 0.1);
  }
  ranks[0]->submit("last", 0, 1, 1);
  drain(*ranks[0]);
  drain(*ranks[1]);
  CHECK(!ranks[1]->failure());
  CHECK_EQ(order(*ranks[1]), "0/0 1/0 2/0 3/0 4/0 5/0 last/0");
}

TEST(a_rank_that_dies_is_named_on_all) {
  const Pair first, second;
  Scheduler leader({0, 3, 100, kLong}, std::vector{first.left, second.left});
  Scheduler survivor({1, 3, 100, kLong}, std::vector{first.right});
  run_threads({[&] { CHECK_EQ(next_name(leader, kLong), "nothing"); },
               [&] { CHECK_EQ(next_name(survivor, kLong), "nothing"); },
               [&] { ::close(second.right); }});
  CHECK_EQ(await_failure(leader), "2: is gone: its control connection ended");
  CHECK_EQ(await_failure(survivor), "2: is gone: its control connection ended");
}

TEST(a_leader_that_dies_is_named) {
  const Pair pair;
  Scheduler follower({1, 2, 100, kLong}, std::vector{pair.right});
  ::close(pair.left);
  CHECK_EQ(next_name(follower, kLong), "nothing");
  CHECK_EQ(await_failure(follower), "0: is gone: its control connection ended");
}

TEST(announcing_to_a_dead_rank_raises_no_signal) {
  const Pair pair;
  Scheduler leader({0, 2, 100, kLong}, std::vector{pair.left});
  ::close(pair.right);
  leader.submit("a", 0, 1, 1);
  leader.submit("b", 0, 1, 1);
  drain(leader);
  CHECK_EQ(await_failure(leader), "1: is gone: its control connection ended");
}

TEST(a_failing_rank_ends_every_next) {
  for (const int64_t num_ranks : {1, 2, 4, 7}) {
    for (int64_t failing : {int64_t{0}, num_ranks - 1}) {
      auto ranks = make_ranks(num_ranks);
      std::vector<std::function<void()>> threads;
      for (auto& rank : ranks) {
        threads.push_back([&rank] { CHECK_EQ(next_name(*rank, kLong), "nothing"); });
      }
      threads.push_back([&] { ranks[static_cast<size_t>(failing)]->fail("out of memory"); });
      run_threads(threads);
      for (auto& rank : ranks) {
        CHECK_EQ(await_failure(*rank), std::to_string(failing) + ": out of memory");
      }
    }
  }
}

TEST(the_first_failure_stands_and_long_texts_are_cut_between_characters) {
  auto ranks = make_ranks(2);
  std::string text = "x";
  while (text.size() < 70'000) text += "\xc3\xa9";  // é
  ranks[1]->fail(text);
  ranks[1]->fail("second");
  CHECK_EQ(await_failure(*ranks[0]), "1: " + text.substr(0, 4095));
  ranks[0]->fail("third");
  CHECK_EQ(await_failure(*ranks[1]), "1: " + text.substr(0, 4095));
}

TEST(goodbye_is_no_failure) {
  auto ranks = make_ranks(4);
  for (auto& rank : ranks) rank->submit("a", 0, 1, 1);
  for (auto& rank : ranks) drain(*rank);
  for (size_t rank : {2, 0, 3}) ranks[rank]->close();
  CHECK_EQ(next_name(*ranks[1]), "nothing");
  for (auto& rank : ranks) CHECK(!rank->failure());
}

TEST(what_a_leader_announced_before_it_left_is_replayed_and_what_it_did_not_fails) {
  auto ranks = make_ranks(2);
  for (auto& rank : ranks) rank->submit("a", 0, 1, 1);
  drain(*ranks[0]);
  ranks[0]->close();
  ranks[1]->submit("b", 0, 1, 1);
  CHECK_EQ(next_name(*ranks[1]), "a/0");
  CHECK_EQ(next_name(*ranks[1], kLong), "nothing");
  CHECK_EQ(await_failure(*ranks[1]), "0: has left; it never announced 'b'");
}

TEST(a_submission_after_the_leader_left_fails_at_once) {
  auto ranks = make_ranks(2);
  ranks[0]->close();
  ranks[1]->poll();
  run_threads({[&] { CHECK_EQ(next_name(*ranks[1], kLong), "nothing"); },
               [&] {
                 std::this_thread::sleep_for(std::chrono::milliseconds(20));
                 ranks[1]->submit("b", 0, 1, 1);
               }});
  CHECK_EQ(await_failure(*ranks[1]), "0: has left; it never announced 'b'");
}

TEST(a_follower_that_leaves_early_is_named) {
  auto ranks = make_ranks(3);
  for (size_t rank : {0, 1}) ranks[rank]->submit("a", 0, 1, 1);
  drain(*ranks[0]);
  ranks[2]->close();  // "a" is announced, and not issued there
  CHECK_EQ(await_failure(*ranks[0]), "2: has left; it does not take part in 'a'");
  CHECK_EQ(await_failure(*ranks[1]), "2: has left; it does not take part in 'a'");
}

TEST(a_request_after_a_follower_left_fails) {
  auto ranks = make_ranks(3);
  ranks[1]->close();
  for (size_t rank : {0, 2}) ranks[rank]->submit("a", 0, 1, 1);
  CHECK_EQ(next_name(*ranks[0], kLong), "nothing");
  CHECK_EQ(await_failure(*ranks[2]), "1: has left; it does not take part in 'a'");
}
