// The leader's order: priority, ties, credit, slices, and what submit refuses.
#include "ranks.h"

using namespace testing;

TEST(lower_priority_goes_first_and_ties_in_the_order_of_submission) {
  auto ranks = make_ranks(1);
  Scheduler& lane = *ranks[0];
  lane.submit("b", 2, 1, 1);
  lane.submit("c", 2, 1, 1);
  lane.submit("a", -7, 1, 1);
  lane.submit("d", INT64_MAX, 1, 1);
  lane.submit("e", INT64_MIN, 1, 1);
  drain(lane);
  CHECK_EQ(order(lane), "e/0 a/0 b/0 c/0 d/0");
}

TEST(order_is_that_of_a_stable_sort) {
  std::mt19937 random(1);
  auto ranks = make_ranks(1);
  std::vector<std::pair<int64_t, std::string>> twin;
  for (int i = 0; i < 3000; ++i) {
    twin.emplace_back(random() % 50, std::to_string(i));
    ranks[0]->submit(twin.back().second, twin.back().first, 1, 1);
  }
  drain(*ranks[0]);
  std::stable_sort(twin.begin(), twin.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  const auto log = ranks[0]->log();
  CHECK_EQ(log.size(), twin.size());
  for (size_t i = 0; i < twin.size(); ++i) CHECK_EQ(log[i].name, twin[i].second);
}

TEST(credit_bounds_bytes_in_flight) {
  auto ranks = make_ranks(1, 10);
  Scheduler& lane = *ranks[0];
  lane.submit("a", 0, 6, 1);
  lane.submit("b", 1, 4, 1);
  lane.submit("c", 2, 1, 1);
  CHECK_EQ(next_name(lane), "a/0");
  CHECK_EQ(next_name(lane), "b/0");  // 10 of 10
  CHECK_EQ(next_name(lane), "nothing");
  CHECK_EQ(lane.bytes_in_flight(), 10);
  lane.done("b", 0);
  CHECK_EQ(next_name(lane), "c/0");
  CHECK_EQ(lane.bytes_in_flight(), 7);
}

TEST(an_urgent_unit_without_credit_is_not_overtaken) {
  auto ranks = make_ranks(1, 10);
  Scheduler& lane = *ranks[0];
  lane.submit("first", 0, 6, 1);
  CHECK_EQ(next_name(lane), "first/0");
  lane.submit("urgent", 1, 5, 1);
  lane.submit("small", 2, 1, 1);
  CHECK_EQ(next_name(lane), "nothing");
  lane.done("first", 0);
  CHECK_EQ(next_name(lane), "urgent/0");
  CHECK_EQ(next_name(lane), "small/0");
}

TEST(a_unit_larger_than_the_credit_goes_alone) {
  for (const int64_t credit : {0, 10}) {
    auto ranks = make_ranks(1, credit);
    Scheduler& lane = *ranks[0];
    lane.submit("large", 0, 100, 1);
    lane.submit("next", 1, 1, 1);
    CHECK_EQ(next_name(lane), "large/0");
    CHECK_EQ(next_name(lane), "nothing");
    lane.done("large", 0);
    CHECK_EQ(next_name(lane), "next/0");
  }
}

TEST(done_ends_a_wait_for_credit) {
  auto ranks = make_ranks(1, 1);
  Scheduler& lane = *ranks[0];
  lane.submit("a", 0, 1, 1);
  lane.submit("b", 0, 1, 1);
  CHECK_EQ(next_name(lane), "a/0");
  run_threads({[&] { CHECK_EQ(next_name(lane, kLong), "b/0"); },
               [&] {
                 std::this_thread::sleep_for(std::chrono::milliseconds(50));
                 lane.done("a", 0);
               }});
}

TEST(an_urgent_request_passes_between_two_slices) {
  auto ranks = make_ranks(1, 1'000'000);
  Scheduler& lane = *ranks[0];
  lane.submit("large", 5, 100, 4);
  CHECK_EQ(next_name(lane), "large/0");
  CHECK_EQ(next_name(lane), "large/1");
  lane.submit("late", 5, 1, 1);
  lane.submit("urgent", 0, 1, 2);
  drain(lane);
  CHECK_EQ(order(lane), "large/0 large/1 urgent/0 urgent/1 large/2 large/3 late/0");
}

TEST(slices_add_up_to_the_request) {
  auto ranks = make_ranks(1, 1'000'000);
  ranks[0]->submit("a", 0, 11, 4);
  drain(*ranks[0]);
  std::string bytes;
  for (const LogEntry& entry : ranks[0]->log()) bytes += std::to_string(entry.num_bytes) + " ";
  CHECK_EQ(bytes, "3 3 3 2 ");
}

TEST(slices_complete_in_any_order_and_the_name_is_free_after_the_last) {
  auto ranks = make_ranks(1);
  Scheduler& lane = *ranks[0];
  lane.submit("a", 0, 3, 3);
  for (int i = 0; i < 3; ++i) lane.next(0);
  lane.done("a", 2);
  lane.done("a", 0);
  CHECK_THROWS(std::invalid_argument, "slice 0 of 'a' is not in flight", lane.done("a", 0));
  CHECK_THROWS(std::invalid_argument, "'a' is queued or in flight", lane.submit("a", 0, 1, 1));
  lane.done("a", 1);
  CHECK_EQ(lane.bytes_in_flight(), 0);
  lane.submit("a", 0, 1, 1);
  CHECK_EQ(next_name(lane), "a/0");
}

TEST(submit_and_done_refuse_mistakes) {
  auto ranks = make_ranks(1);
  Scheduler& lane = *ranks[0];
  const std::string longest(65535, 'x');
  lane.submit(longest, 0, 0, 1);
  lane.submit("large", 0, Scheduler::kMaxRequestBytes, INT32_MAX);
  CHECK_THROWS(std::invalid_argument, "65536 bytes", lane.submit(longest + "x", 0, 0, 1));
  CHECK_THROWS(std::invalid_argument, "empty", lane.submit("", 0, 0, 1));
  CHECK_THROWS(std::invalid_argument, "num_bytes = -1 of 'a'", lane.submit("a", 0, -1, 1));
  CHECK_THROWS(std::invalid_argument,
               "num_bytes = ", lane.submit("a", 0, Scheduler::kMaxRequestBytes + 1, 1));
  CHECK_THROWS(std::invalid_argument, "num_slices = 0 of 'a'", lane.submit("a", 0, 1, 0));
  CHECK_THROWS(std::invalid_argument, "num_slices = ", lane.submit("a", 0, 1, int64_t{1} << 31));
  CHECK_THROWS(std::invalid_argument, "in flight already", lane.submit("large", 0, 1, 1));
  CHECK_THROWS(std::invalid_argument, "not in flight", lane.done("large", 0));
  CHECK_THROWS(std::invalid_argument, "not in flight", lane.done("unknown", 0));
  CHECK_THROWS(std::invalid_argument, "timeout_s = -1", lane.next(-1));
  CHECK_EQ(lane.num_queued(), 2u);
}

TEST(construction_refuses_mistakes) {
  auto make = [](Options options, std::vector<int> fds) { Scheduler refused(options, fds); };
  CHECK_THROWS(std::invalid_argument, "num_ranks = 0", make({0, 0, 1, 1}, {}));
  CHECK_THROWS(std::invalid_argument, "rank = 2: from 0 to 1", make({2, 2, 1, 1}, {}));
  CHECK_THROWS(std::invalid_argument, "credit_bytes = -1", make({0, 1, -1, 1}, {}));
  CHECK_THROWS(std::invalid_argument, "timeout_s = 0", make({0, 1, 1, 0}, {}));
  CHECK_THROWS(std::invalid_argument, "timeout_s = nan", make({0, 1, 1, NAN}, {}));
  CHECK_THROWS(std::invalid_argument, "log_size = 0", make({0, 1, 1, 1, 0}, {}));
  CHECK_THROWS(std::invalid_argument, "takes 2", make({0, 3, 1, 1}, {0}));
  CHECK_THROWS(std::invalid_argument, "not a connected stream socket", make({1, 2, 1, 1}, {-1}));
  const Pair pair;
  CHECK_THROWS(std::invalid_argument, "are both", make({0, 3, 1, 1}, {pair.left, pair.left}));
  CHECK_EQ(::close(pair.left) + ::close(pair.right), 0);  // they were left to us
}
