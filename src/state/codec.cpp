#include "state/codec.h"

#include <type_traits>

#include <c10/util/Exception.h>

namespace muon::detail {
namespace {

// Calls `visit` with a null pointer of the stored type.
template <typename Visit>
auto with_stored(c10::ScalarType dtype, Visit visit) {
  switch (dtype) {
    case c10::ScalarType::Double:
      return visit(static_cast<double*>(nullptr));
    case c10::ScalarType::BFloat16:
      return visit(static_cast<c10::BFloat16*>(nullptr));
    case c10::ScalarType::Half:
      return visit(static_cast<c10::Half*>(nullptr));
    default:
      TORCH_INTERNAL_ASSERT(dtype == c10::ScalarType::Float, "no codec for ", dtype);
      return visit(static_cast<float*>(nullptr));
  }
}

} // namespace

template <typename Compute>
const Compute* load_run(
    c10::ScalarType dtype, const void* data, std::int64_t offset, std::int64_t stride,
    std::int64_t n, Compute* buffer) {
  return with_stored(dtype, [&](auto* tag) {
    using Stored = std::remove_pointer_t<decltype(tag)>;
    return PlainCodec<Stored, Compute>::load(
        static_cast<const Stored*>(data) + offset, stride, n, buffer);
  });
}

template <typename Compute>
void store_run(
    c10::ScalarType dtype, void* data, std::int64_t offset, std::int64_t stride, std::int64_t n,
    const Compute* values) {
  with_stored(dtype, [&](auto* tag) {
    using Stored = std::remove_pointer_t<decltype(tag)>;
    PlainCodec<Stored, Compute>::store(static_cast<Stored*>(data) + offset, stride, n, values);
  });
}

bool has_codec(c10::ScalarType dtype) {
  return dtype == c10::ScalarType::Float || dtype == c10::ScalarType::Double ||
      dtype == c10::ScalarType::BFloat16 || dtype == c10::ScalarType::Half;
}

template const float* load_run(
    c10::ScalarType, const void*, std::int64_t, std::int64_t, std::int64_t, float*);
template const double* load_run(
    c10::ScalarType, const void*, std::int64_t, std::int64_t, std::int64_t, double*);
template void store_run(
    c10::ScalarType, void*, std::int64_t, std::int64_t, std::int64_t, const float*);
template void store_run(
    c10::ScalarType, void*, std::int64_t, std::int64_t, std::int64_t, const double*);

} // namespace muon::detail
