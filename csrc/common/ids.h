// Checks on row ids, before anything is read or written through them.
#pragma once

#include <atomic>
#include <cstdint>

#include "common/check.h"
#include "common/parallel.h"

namespace commlib {

struct IdOrder {
  bool increasing = true;  // strictly: sorted and unique
};

// Throws IndexError unless every id is in [0, limit). Reports whether ids increase strictly.
inline IdOrder check_ids_in_range(const int64_t* ids, int64_t n, int64_t limit, const char* name) {
  std::atomic<bool> bad{false}, unordered{false};
  parallel_items(n, 16, [&](int64_t begin, int64_t end) {
    bool out = false, disorder = false;
    for (int64_t i = begin; i < end; ++i) {
      out |= static_cast<uint64_t>(ids[i]) >= static_cast<uint64_t>(limit);
    }
    for (int64_t i = begin > 0 ? begin : 1; i < end; ++i) disorder |= ids[i] <= ids[i - 1];
    if (out) bad = true;
    if (disorder) unordered = true;
  });
  if (bad) {
    for (int64_t i = 0; i < n; ++i) {
      COMMLIB_CHECK(ids[i] >= 0 && ids[i] < limit, "IndexError", name, "[", i, "] = ", ids[i],
                    " is outside [0, ", limit, ")");
    }
  }
  return {!unordered};
}

}  // namespace commlib
