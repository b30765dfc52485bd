#include "scheduler/connection.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace commlib::scheduler {

namespace {

#ifdef MSG_NOSIGNAL
constexpr int kSendFlags = MSG_NOSIGNAL;
#else
constexpr int kSendFlags = 0;  // SO_NOSIGPIPE, in the constructor
#endif

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

}  // namespace

bool is_connected_stream(int fd) {
  int type = 0;
  socklen_t size = sizeof type;
  if (::getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) != 0 || type != SOCK_STREAM) return false;
  sockaddr_storage peer;
  size = sizeof peer;
  return ::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) == 0;
}

Connection::Connection(int fd) : fd_(fd) {
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);  // other families refuse it
#ifdef SO_NOSIGPIPE
  ::setsockopt(fd, SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof on);
#endif
}

Connection::Connection(Connection&& other) noexcept
    : decoder(std::move(other.decoder)),
      fd_(std::exchange(other.fd_, -1)),
      reads_(other.reads_),
      writes_(other.writes_),
      backlog_(std::move(other.backlog_)),
      sent_(other.sent_) {}

Connection::~Connection() {
  if (fd_ >= 0) ::close(fd_);
}

pollfd Connection::interest() const {
  const bool has_backlog = backlog_bytes() > 0;
  pollfd entry{};
  entry.fd = reads_ || has_backlog ? fd_ : -1;
  entry.events = static_cast<short>((reads_ ? POLLIN : 0) | (has_backlog ? POLLOUT : 0));
  return entry;
}

void Connection::send(std::string_view bytes) {
  if (!writes_) return;
  backlog_.append(bytes);
  flush();
}

void Connection::flush() {
  while (writes_ && sent_ < backlog_.size()) {
    const ssize_t sent =
        ::send(fd_, backlog_.data() + sent_, backlog_.size() - sent_, kSendFlags | MSG_DONTWAIT);
    if (sent >= 0) {
      sent_ += static_cast<size_t>(sent);
    } else if (would_block(errno)) {
      // Forget what was sent once it outweighs what was not: moves each byte at most once.
      if (sent_ > backlog_.size() / 2) {
        backlog_.erase(0, sent_);
        sent_ = 0;
      }
      return;
    } else if (errno != EINTR) {
      stop_writing();
    }
  }
  backlog_.clear();
  sent_ = 0;
}

Connection::Received Connection::receive(std::span<char> scratch) {
  for (;;) {
    const ssize_t got = ::recv(fd_, scratch.data(), scratch.size(), MSG_DONTWAIT);
    if (got > 0) {
      decoder.feed({scratch.data(), static_cast<size_t>(got)});
      return Received::kBytes;
    }
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && would_block(errno)) return Received::kNothing;
    return Received::kEnd;
  }
}

void Connection::stop_writing() {
  writes_ = false;
  backlog_.clear();
  sent_ = 0;
}

void Connection::close(std::span<char> scratch) {
  if (fd_ < 0) return;
  ::shutdown(fd_, SHUT_WR);
  // A peer that sends without end shall not keep us.
  for (int round = 0; round < 256; ++round) {
    const ssize_t got = ::recv(fd_, scratch.data(), scratch.size(), MSG_DONTWAIT);
    if (got <= 0 && !(got < 0 && errno == EINTR)) break;
  }
  ::close(std::exchange(fd_, -1));
  reads_ = false;
  stop_writing();
}

}  // namespace commlib::scheduler
