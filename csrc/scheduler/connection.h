// One control connection: a stream socket that never blocks and never raises SIGPIPE.
#pragma once

#include <poll.h>

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "scheduler/wire.h"

namespace commlib::scheduler {

// True if `fd` is a connected stream socket.
bool is_connected_stream(int fd);

// Sends are kept back in memory when the peer does not read. Not thread-safe.
class Connection {
 public:
  enum class Received { kBytes, kNothing, kEnd };

  // Owns `fd` from here on.
  explicit Connection(int fd);
  Connection(Connection&& other) noexcept;
  Connection& operator=(Connection&&) = delete;
  ~Connection();

  int fd() const { return fd_; }
  bool reads() const { return reads_; }
  bool writes() const { return writes_; }
  size_t backlog_bytes() const { return backlog_.size() - sent_; }

  // What poll(2) shall look for; descriptor -1, which it leaves out, for nothing.
  pollfd interest() const;

  // Sends bytes at once, as far as the socket takes them; keeps the rest for flush. Dropped after
  // stop_writing or once the peer is gone, which reading then finds out.
  void send(std::string_view bytes);

  // Sends what was kept, as far as the socket takes it.
  void flush();

  // Feeds the decoder what has arrived, at most `scratch.size()` bytes.
  Received receive(std::span<char> scratch);

  // Ends one direction on this side: what comes is no longer looked at; what is kept is dropped.
  void stop_reading() { reads_ = false; }
  void stop_writing();

  // Ends both directions in order, and closes the socket. What has arrived is read and forgotten:
  // closing with unread bytes would reset the connection, and the peer might lose our last words.
  void close(std::span<char> scratch);

  Decoder decoder;

 private:
  int fd_;
  bool reads_ = true;
  bool writes_ = true;
  std::string backlog_;
  size_t sent_ = 0;  // of backlog_
};

}  // namespace commlib::scheduler
