// Large outputs: fewer page faults, and stores that do not read what they overwrite.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace commlib {

inline constexpr int64_t kLarge = int64_t{8} << 20;  // bytes; more than a core's share of the cache

// Asks for 2 MiB pages below a fresh allocation. A hint: where it is refused nothing changes.
inline void advise_huge(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 4096;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kPage * kPage;
  if (bytes >= kLarge && end > begin) {
    (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  }
#else
  (void)data, (void)bytes;
#endif
}

// Starts loading a row that is needed soon: the processor does not foresee jumps between rows.
inline void prefetch(const void* row, int64_t bytes) {
  constexpr int64_t kMost = 2048;  // the start of a long row is enough, the rest is foreseen
  for (int64_t i = 0; i < bytes && i < kMost; i += 64) {
    __builtin_prefetch(static_cast<const char*>(row) + i);
  }
}

inline constexpr int64_t kAhead = 4;  // rows between a prefetch and its use

// memcpy; with `stream` it goes past the cache where alignment allows: faster into large memory
// that is there already, slower into fresh pages, which the kernel has just cleared into the cache.
// Call drain() when done.
inline void copy_bytes(void* dst, const void* src, int64_t bytes, bool stream) {
#if defined(__SSE2__)
  if (stream && bytes % 64 == 0 && reinterpret_cast<uintptr_t>(dst) % 16 == 0) {
    auto* to = static_cast<__m128i*>(dst);
    const auto* from = static_cast<const __m128i*>(src);
    for (int64_t i = 0; i < bytes / 16; i += 4) {
      const __m128i a = _mm_loadu_si128(from + i), b = _mm_loadu_si128(from + i + 1);
      const __m128i c = _mm_loadu_si128(from + i + 2), d = _mm_loadu_si128(from + i + 3);
      _mm_stream_si128(to + i, a);
      _mm_stream_si128(to + i + 1, b);
      _mm_stream_si128(to + i + 2, c);
      _mm_stream_si128(to + i + 3, d);
    }
    return;
  }
#endif
  (void)stream;
  std::memcpy(dst, src, static_cast<size_t>(bytes));
}

// Makes streamed stores visible to other threads.
inline void drain() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace commlib
