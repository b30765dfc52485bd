// A pipe that ends a poll(2) from another thread. (eventfd is Linux's alone.)
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace commlib::scheduler {

class Wakeup {
 public:
  // Throws std::system_error where no descriptors are left.
  Wakeup() {
    if (::pipe(fds_) != 0) throw std::system_error(errno, std::generic_category(), "pipe");
    for (int fd : fds_) {
      ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
      ::fcntl(fd, F_SETFD, FD_CLOEXEC);
    }
  }
  Wakeup(const Wakeup&) = delete;
  Wakeup& operator=(const Wakeup&) = delete;
  ~Wakeup() { close(); }

  // The descriptor to poll for POLLIN.
  int fd() const { return fds_[0]; }

  // Makes fd() readable. A full pipe is readable already, so nothing can be lost.
  void signal() {
    const char byte = 0;
    while (::write(fds_[1], &byte, 1) < 0 && errno == EINTR) {
    }
  }

  // Makes fd() unreadable again.
  void drain() {
    char bytes[64];
    ssize_t got;
    do {
      got = ::read(fds_[0], bytes, sizeof bytes);
    } while (got == sizeof bytes || (got < 0 && errno == EINTR));
  }

  // Gives the descriptors back; nobody may poll or signal any more. Idempotent.
  void close() {
    for (int& fd : fds_) {
      if (fd >= 0) ::close(fd);
      fd = -1;
    }
  }

 private:
  int fds_[2];
};

}  // namespace commlib::scheduler
