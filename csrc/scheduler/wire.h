// Control messages as bytes: pure encoding and decoding, no socket.
//
//   byte  0     1        2..3        4..7    8..15   16..
//         kind  version  text_bytes  index   count   text
//
//   kind       index            count            text
//   announce   slice_idx        num_slices       name of the request
//   failure    rank that failed 0                what happened
//   goodbye    0                units issued     nothing
//
// Integers are unsigned, little endian. A message is at most 16 + 65535 bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace commlib::scheduler {

inline constexpr size_t kHeaderBytes = 16;
inline constexpr size_t kMaxTextBytes = 65535;
inline constexpr uint8_t kVersion = 1;

enum class Kind : uint8_t { kAnnounce = 1, kFailure = 2, kGoodbye = 3 };

struct Message {
  Kind kind = Kind::kGoodbye;
  uint32_t index = 0;
  uint64_t count = 0;
  std::string text;
};

// Returns the bytes of a message; text of more than kMaxTextBytes is the caller's mistake.
inline std::string encode(Kind kind, uint32_t index, uint64_t count, std::string_view text) {
  std::string bytes(kHeaderBytes, '\0');
  bytes.reserve(kHeaderBytes + text.size());
  auto put = [&bytes](size_t at, size_t width, uint64_t value) {
    for (size_t i = 0; i < width; ++i) bytes[at + i] = static_cast<char>(value >> (8 * i) & 0xff);
  };
  put(0, 1, static_cast<uint8_t>(kind));
  put(1, 1, kVersion);
  put(2, 2, text.size());
  put(4, 4, index);
  put(8, 8, count);
  bytes.append(text);
  return bytes;
}

// Turns a stream of bytes back into messages; holds at most one message that is not complete.
class Decoder {
 public:
  enum class Status { kMessage, kNeedMore, kMalformed };

  // Appends bytes received; they are copied.
  void feed(std::string_view bytes) {
    buffer_.erase(0, begin_);
    begin_ = 0;
    buffer_.append(bytes);
  }

  // Takes the next whole message into `message`. After kMalformed the stream has no meaning any
  // more, error() says why, and every later call returns kMalformed.
  Status next(Message& message) {
    if (!error_.empty()) return Status::kMalformed;
    if (buffer_.size() - begin_ < kHeaderBytes) return Status::kNeedMore;
    const uint64_t kind = get(0, 1), version = get(1, 1), text_bytes = get(2, 2);
    const uint64_t index = get(4, 4), count = get(8, 8);
    if (version != kVersion) return malformed("version", version);
    if (kind < 1 || kind > 3) return malformed("kind", kind);
    const auto type = static_cast<Kind>(kind);
    if (type == Kind::kAnnounce && (count == 0 || index >= count)) {
      return malformed("slice_idx", index);
    }
    if (type == Kind::kAnnounce && text_bytes == 0) return malformed("length of name", 0);
    if (type == Kind::kAnnounce && count > INT32_MAX) return malformed("num_slices", count);
    if (type == Kind::kGoodbye && text_bytes != 0) return malformed("text_bytes", text_bytes);
    if (buffer_.size() - begin_ < kHeaderBytes + text_bytes) return Status::kNeedMore;
    message.kind = type;
    message.index = static_cast<uint32_t>(index);
    message.count = count;
    message.text.assign(buffer_, begin_ + kHeaderBytes, text_bytes);
    begin_ += kHeaderBytes + text_bytes;
    return Status::kMessage;
  }

  const std::string& error() const { return error_; }

 private:
  uint64_t get(size_t at, size_t width) const {
    uint64_t value = 0;
    for (size_t i = 0; i < width; ++i) {
      value |= uint64_t{static_cast<uint8_t>(buffer_[begin_ + at + i])} << (8 * i);
    }
    return value;
  }

  Status malformed(const char* field, uint64_t value) {
    error_ = std::string(field) + " = " + std::to_string(value);
    return Status::kMalformed;
  }

  std::string buffer_;
  size_t begin_ = 0;  // of the first message not taken yet
  std::string error_;
};

}  // namespace commlib::scheduler
