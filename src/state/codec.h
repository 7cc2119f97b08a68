#pragma once

#include <cstdint>
#include <type_traits>

#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "target_clones.h"

/// How stored numbers become the numbers a loop computes with. A storage
/// format is a codec here, not an optimizer: loops read and write runs of at
/// most kRun numbers through it and compute on float or double.
namespace muon::detail {

constexpr std::int64_t kRun = 1024;

/// Stored numbers of a plain dtype.
template <typename Stored, typename Compute>
struct PlainCodec {
  /// The run itself where it is already what the loop computes with, else
  /// `buffer` filled with it.
  static const Compute* load(
      const Stored* data, std::int64_t stride, std::int64_t n, Compute* buffer) {
    if constexpr (std::is_same_v<Stored, Compute>) {
      if (stride == 1) {
        return data;
      }
    }
    if (stride == 1) {
      load_dense(data, n, buffer);
    } else {
      for (std::int64_t i = 0; i < n; ++i) {
        buffer[i] = static_cast<Compute>(data[i * stride]);
      }
    }
    return buffer;
  }

  static void store(Stored* data, std::int64_t stride, std::int64_t n, const Compute* values) {
    if (stride == 1) {
      store_dense(data, n, values);
    } else {
      for (std::int64_t i = 0; i < n; ++i) {
        data[i * stride] = to_stored(values[i]);
      }
    }
  }

 private:
  // c10's 16-bit types are made of floats; a double is rounded on its way.
  static Stored to_stored(Compute value) {
    if constexpr (std::is_floating_point_v<Stored>) {
      return static_cast<Stored>(value);
    } else {
      return static_cast<Stored>(static_cast<float>(value));
    }
  }

  static void load_dense(const Stored* data, std::int64_t n, Compute* buffer) {
    for (std::int64_t i = 0; i < n; ++i) {
      buffer[i] = static_cast<Compute>(data[i]);
    }
  }

  static void store_dense(Stored* data, std::int64_t n, const Compute* values) {
    for (std::int64_t i = 0; i < n; ++i) {
      data[i] = to_stored(values[i]);
    }
  }
};

/// Reads `n` numbers of dtype `dtype`, `stride` apart from element `offset` of
/// `data`, as Compute: a pointer into `data` or into `buffer`.
template <typename Compute>
const Compute* load_run(
    c10::ScalarType dtype, const void* data, std::int64_t offset, std::int64_t stride,
    std::int64_t n, Compute* buffer);

/// Writes `n` numbers, rounding to nearest.
template <typename Compute>
void store_run(
    c10::ScalarType dtype, void* data, std::int64_t offset, std::int64_t stride, std::int64_t n,
    const Compute* values);

/// Whether the loops can read and write this dtype.
bool has_codec(c10::ScalarType dtype);

} // namespace muon::detail
