// The wire: what is encoded is decoded in pieces of any size; what is malformed is a failure.
#include "scheduler/wire.h"

#include "ranks.h"

using namespace testing;
using namespace commlib::scheduler;

namespace {

std::string valid_stream(std::mt19937& random, int num_messages) {
  std::string bytes;
  for (int i = 0; i < num_messages; ++i) {
    const std::string name = "r" + std::to_string(i) + std::string(random() % 30, 'x');
    if (random() % 20 == 0) {
      bytes += encode(Kind::kFailure, random() % 2, 0, name);
    } else {
      bytes += encode(Kind::kAnnounce, 0, 1, name);
    }
  }
  return bytes;
}

// What a rank makes of bytes that its peer sends before it closes.
std::string outcome(int64_t rank, std::string_view bytes) {
  const Pair pair;
  Scheduler lane({rank, 2, 100, kLong}, std::vector{pair.left});
  lane.submit("request", 0, 1, 1);
  size_t sent = 0;
  while (sent < bytes.size()) {
    const ssize_t more =
        ::send(pair.right, bytes.data() + sent, bytes.size() - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (more > 0) sent += static_cast<size_t>(more);
    lane.poll();
    if (more < 0 && lane.failure()) break;
  }
  ::close(pair.right);
  return await_failure(lane);
}

}  // namespace

TEST(messages_survive_any_cut) {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    const std::string longest(round % 50 == 0 ? kMaxTextBytes : 5, 'n');
    const std::string bytes = encode(Kind::kAnnounce, 3, 9, longest) +
                              encode(Kind::kFailure, 0xffffffff, 0, {"a\0b", 3}) +
                              encode(Kind::kGoodbye, 0, uint64_t{1} << 40, {});
    Decoder decoder;
    std::vector<Message> messages;
    for (size_t at = 0; at < bytes.size();) {
      const size_t size = std::min<size_t>(1 + random() % (round + 1), bytes.size() - at);
      decoder.feed(std::string_view(bytes).substr(at, size));
      at += size;
      Message message;
      while (decoder.next(message) == Decoder::Status::kMessage) messages.push_back(message);
    }
    CHECK_EQ(messages.size(), 3u);
    CHECK(messages[0].kind == Kind::kAnnounce && messages[0].text == longest);
    CHECK(messages[0].index == 3 && messages[0].count == 9);
    CHECK_EQ(messages[1].text.size(), 3u);
    CHECK_EQ(messages[1].index, 0xffffffffu);
    CHECK_EQ(messages[2].count, uint64_t{1} << 40);
  }
}

TEST(malformed_messages_are_named) {
  auto changed = [](size_t at, char value) {
    std::string bytes = encode(Kind::kAnnounce, 0, 1, "name");
    bytes[at] = value;
    return bytes;
  };
  const std::string prefix = "0: sent a malformed control message: ";
  CHECK_EQ(outcome(1, changed(0, 0)), prefix + "kind = 0");
  CHECK_EQ(outcome(1, changed(0, 9)), prefix + "kind = 9");
  CHECK_EQ(outcome(1, changed(1, 7)), prefix + "version = 7");
  CHECK_EQ(outcome(1, encode(Kind::kAnnounce, 0, 1, "")), prefix + "length of name = 0");
  CHECK_EQ(outcome(1, encode(Kind::kAnnounce, 2, 2, "a")), prefix + "slice_idx = 2");
  CHECK_EQ(outcome(1, encode(Kind::kAnnounce, 0, uint64_t{1} << 40, "a")),
           prefix + "num_slices = 1099511627776");
  CHECK_EQ(outcome(1, encode(Kind::kFailure, 2, 0, "a")), prefix + "rank = 2");
  CHECK_EQ(outcome(1, encode(Kind::kAnnounce, 1, 2, "a")),
           prefix + "slice 1 of 2 of 'a', out of order");
  CHECK_EQ(outcome(1, encode(Kind::kAnnounce, 0, 2, "a") + encode(Kind::kAnnounce, 0, 2, "a")),
           prefix + "slice 0 of 2 of 'a', out of order");
  CHECK_EQ(outcome(1, encode(Kind::kAnnounce, 0, 2, "a") + encode(Kind::kAnnounce, 1, 3, "a")),
           prefix + "slice 1 of 3 of 'a', out of order");
  CHECK_CONTAINS(outcome(0, encode(Kind::kAnnounce, 0, 1, "a")), "1: sent a malformed");
  CHECK_EQ(outcome(1, encode(Kind::kAnnounce, 0, 1, "name").substr(0, 19)),
           "0: is gone: its control connection ended");
}

TEST(a_malformed_peer_is_told_why) {
  const Pair pair;
  Scheduler lane({1, 2, 100, kLong}, std::vector{pair.left});
  CHECK_EQ(::send(pair.right, "HTTP/1.1 400 Bad", 16, 0), 16);
  CHECK_CONTAINS(await_failure(lane), "0: sent a malformed");
  char bytes[256];
  const ssize_t got = ::recv(pair.right, bytes, sizeof bytes, 0);
  CHECK_CONTAINS(std::string(bytes, static_cast<size_t>(got)), "malformed");
  ::close(pair.right);
}

TEST(random_bytes_never_crash) {
  std::mt19937 random(5);
  for (int round = 0; round < 300; ++round) {
    std::string bytes(random() % 300, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    CHECK_CONTAINS(outcome(round % 2, bytes), std::to_string(1 - round % 2) + ": ");
  }
}

TEST(flipped_bytes_never_crash) {
  std::mt19937 random(6);
  for (int round = 0; round < 300; ++round) {
    std::string bytes = valid_stream(random, 20);
    for (unsigned flips = 1 + random() % 4; flips > 0; --flips) {
      bytes[random() % bytes.size()] ^= static_cast<char>(1 + random() % 255);
    }
    outcome(round % 2, bytes);  // a goodbye may come of it, so any outcome will do
  }
}

TEST(a_peer_that_announces_without_end_is_stopped) {
  const std::string one = encode(Kind::kAnnounce, 0, 1, "a");
  std::string bytes;
  for (size_t i = 0; i <= Scheduler::kMaxAhead; ++i) bytes += one;
  CHECK_EQ(outcome(1, bytes), "1: is more than 1048576 units behind rank 0, at 'a'");
}

TEST(a_follower_that_never_reads_is_named) {
  const Pair pair;
  Scheduler leader({0, 2, 100, 0.2}, std::vector{pair.left});
  const std::string suffix(60'000, 'x');
  for (int i = 0; !leader.failure(); ++i) {
    leader.submit(std::to_string(i) + suffix, 0, 0, 1);
    drain(leader);
  }
  CHECK_EQ(await_failure(leader), "1: does not read its control connection: 64 MiB wait for it");
  ::close(pair.right);
}
