// Small matrices, one a thread at a time, everything in its cache.
//
// A matrix is held "tall" (long side first) and padded with zero columns to a
// multiple of kTile, so that no loop has a remainder; zeros stay zeros. With r
// symmetric, every product has one shape: out[i, :] = sum_k x[k, i] y[k, :].
#include <algorithm>
#include <array>
#include <vector>

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include "orthogonalize/iteration.h"
#include "target_clones.h"

namespace muon::detail {
namespace {

constexpr std::int64_t kTile = 16; // columns of a register tile
constexpr std::int64_t kMaxSmall = 64;

template <typename T>
struct Buffers {
  std::int64_t n = 0; // short side
  std::int64_t ld = 0; // short side, padded
  std::int64_t m = 0; // long side
  std::vector<T> x; // [m, ld]
  std::array<std::vector<T>, 5> square; // [ld, ld]

  Buffers(std::int64_t short_side, std::int64_t long_side)
      : n(short_side), ld((short_side + kTile - 1) / kTile * kTile), m(long_side) {
    x.assign(static_cast<std::size_t>(m * ld), T{0});
    for (auto& buffer : square) {
      buffer.assign(static_cast<std::size_t>(ld * ld), T{0});
    }
  }
};

template <typename T>
struct Lanes {
  typedef T Vector __attribute__((vector_size(kTile * sizeof(T)), aligned(sizeof(T))));
};

// sum[i] = sum_k left[k, i] right[k, 0 .. kTile]
template <typename T, std::int64_t kRows>
MUON_ALWAYS_INLINE void accumulate_tile(
    typename Lanes<T>::Vector (&sum)[kRows], const T* left, std::int64_t left_stride,
    const T* right, std::int64_t right_stride, std::int64_t depth) {
  for (std::int64_t k = 0; k < depth; ++k) {
    const auto row = *reinterpret_cast<const typename Lanes<T>::Vector*>(right + k * right_stride);
    const T* column = left + k * left_stride;
    for (std::int64_t i = 0; i < kRows; ++i) {
      sum[i] += column[i] * row;
    }
  }
}

// out[i0 .. i0 + kRows, j0 .. j0 + kTile] = alpha sum_k x[k, i] y[k, j] + beta c
template <typename T, std::int64_t kRows>
MUON_ALWAYS_INLINE void product_tile(
    T* out, const T* x, const T* y, const T* c, T alpha, T beta, std::int64_t depth,
    std::int64_t ld, std::int64_t i0, std::int64_t j0) {
  typename Lanes<T>::Vector sum[kRows] = {};
  accumulate_tile<T, kRows>(sum, x + i0, ld, y + j0, ld, depth);
  for (std::int64_t i = 0; i < kRows; ++i) {
    const std::int64_t at = (i0 + i) * ld + j0;
    typename Lanes<T>::Vector result = alpha * sum[i];
    if (c != nullptr) {
      result += beta * *reinterpret_cast<const typename Lanes<T>::Vector*>(c + at);
    }
    *reinterpret_cast<typename Lanes<T>::Vector*>(out + at) = result;
  }
}

// out = alpha x^T y + beta c, symmetric: the tiles up to the diagonal, mirrored.
template <typename T, std::int64_t kRows>
MUON_ALWAYS_INLINE void symmetric_product(
    T* out, const T* x, const T* y, const T* c, T alpha, T beta, std::int64_t depth, std::int64_t n,
    std::int64_t ld) {
  for (std::int64_t i0 = 0; i0 < n; i0 += kRows) {
    for (std::int64_t j0 = 0; j0 <= i0; j0 += kTile) {
      product_tile<T, kRows>(out, x, y, c, alpha, beta, depth, ld, i0, j0);
    }
  }
  // Exactly symmetric, or x^T y + a x would mix x with its transpose and grow
  // their difference in every product.
  for (std::int64_t i = 1; i < n; ++i) {
    for (std::int64_t j = 0; j < i; ++j) {
      out[j * ld + i] = out[i * ld + j];
    }
  }
}

// x <- x q. A block of rows is transposed aside first: its columns are then as
// close together as a tile reads them, and x is free for the result.
template <typename T, std::int64_t kRows>
MUON_ALWAYS_INLINE void multiply_rows(
    T* x, const T* q, std::int64_t rows, std::int64_t n, std::int64_t ld) {
  T block[kMaxSmall * kRows];
  for (std::int64_t r0 = 0; r0 < rows; r0 += kRows) {
    const std::int64_t height = std::min(kRows, rows - r0);
    for (std::int64_t i = 0; i < height; ++i) {
      for (std::int64_t k = 0; k < n; ++k) {
        block[k * kRows + i] = x[(r0 + i) * ld + k];
      }
    }
    for (std::int64_t j0 = 0; j0 < ld; j0 += kTile) {
      typename Lanes<T>::Vector sum[kRows] = {};
      accumulate_tile<T, kRows>(sum, block, kRows, q + j0, ld, n);
      for (std::int64_t i = 0; i < height; ++i) {
        *reinterpret_cast<typename Lanes<T>::Vector*>(x + (r0 + i) * ld + j0) = sum[i];
      }
    }
  }
}

// One run of steps: r = x^T x, q the product of the steps' polynomials in r,
// x <- x q.
template <typename T, std::int64_t kRows>
MUON_ALWAYS_INLINE void run_steps(
    Buffers<T>& buffers, const Coefficients* steps, std::size_t count) {
  const std::int64_t n = buffers.n;
  const std::int64_t ld = buffers.ld;
  T* r = buffers.square[0].data();
  T* z = buffers.square[1].data();
  T* w = buffers.square[2].data();
  T* q = buffers.square[3].data();
  T* next = buffers.square[4].data();
  symmetric_product<T, kRows>(
      r, buffers.x.data(), buffers.x.data(), nullptr, T{1}, T{0}, buffers.m, n, ld);
  for (std::size_t k = 0; k < count; ++k) {
    const T a = static_cast<T>(steps[k][0]);
    const T b = static_cast<T>(steps[k][1]);
    const T c = static_cast<T>(steps[k][2]);
    symmetric_product<T, kRows>(z, r, r, r, c, b, n, n, ld);
    if (k + 1 < count) {
      symmetric_product<T, kRows>(w, r, z, r, T{1}, a, n, n, ld);
      symmetric_product<T, kRows>(r, w, z, w, T{1}, a, n, n, ld);
    }
    if (k == 0) {
      std::copy(z, z + ld * ld, q);
      for (std::int64_t i = 0; i < n; ++i) {
        q[i * ld + i] += a;
      }
    } else {
      symmetric_product<T, kRows>(next, q, z, q, T{1}, a, n, n, ld);
      std::swap(q, next);
    }
  }
  multiply_rows<T, kRows>(buffers.x.data(), q, buffers.m, n, ld);
}

// The register tile follows the number of vector registers: 32 with AVX-512.
template <typename T>
using Kernel = void (*)(Buffers<T>&, const Coefficients*, std::size_t);

template <typename T>
void kernel_baseline(Buffers<T>& buffers, const Coefficients* steps, std::size_t count) {
  run_steps<T, 4>(buffers, steps, count);
}

#if defined(__x86_64__)
template <typename T>
__attribute__((target("avx2,fma"))) void kernel_avx2(
    Buffers<T>& buffers, const Coefficients* steps, std::size_t count) {
  run_steps<T, 4>(buffers, steps, count);
}

template <typename T>
__attribute__((target("avx512f,avx512vl,prefer-vector-width=512"))) void kernel_avx512(
    Buffers<T>& buffers, const Coefficients* steps, std::size_t count) {
  run_steps<T, 8>(buffers, steps, count);
}
#endif

template <typename T>
Kernel<T> best_kernel() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl")) {
    return kernel_avx512<T>;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return kernel_avx2<T>;
  }
#endif
  return kernel_baseline<T>;
}

template <typename T>
void load(Buffers<T>& buffers, const T* matrix, bool is_tall) {
  for (std::int64_t i = 0; i < buffers.m; ++i) {
    for (std::int64_t j = 0; j < buffers.n; ++j) {
      buffers.x[static_cast<std::size_t>(i * buffers.ld + j)] =
          is_tall ? matrix[i * buffers.n + j] : matrix[j * buffers.m + i];
    }
  }
}

template <typename T>
void store(const Buffers<T>& buffers, T* matrix, bool is_tall) {
  for (std::int64_t i = 0; i < buffers.m; ++i) {
    for (std::int64_t j = 0; j < buffers.n; ++j) {
      (is_tall ? matrix[i * buffers.n + j] : matrix[j * buffers.m + i]) =
          buffers.x[static_cast<std::size_t>(i * buffers.ld + j)];
    }
  }
}

} // namespace

bool is_small(std::int64_t n) {
  return n <= kMaxSmall;
}

void iterate_small_(at::Tensor matrices, const Iteration& iteration) {
  const std::vector<std::size_t> lengths =
      run_lengths(iteration.form, iteration.coefficients.size());
  const std::int64_t rows = matrices.size(1);
  const std::int64_t cols = matrices.size(2);
  const bool is_tall = rows > cols;
  const std::int64_t n = std::min(rows, cols);
  const std::int64_t m = std::max(rows, cols);
  AT_DISPATCH_FLOATING_TYPES(matrices.scalar_type(), "muon_iterate_small", [&] {
    static const Kernel<scalar_t> kernel = best_kernel<scalar_t>();
    auto* data = matrices.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, matrices.size(0), 1, [&](std::int64_t begin, std::int64_t end) {
      Buffers<scalar_t> buffers(n, m);
      for (std::int64_t i = begin; i < end; ++i) {
        load(buffers, data + i * n * m, is_tall);
        const Coefficients* steps = iteration.coefficients.data();
        for (const std::size_t length : lengths) {
          kernel(buffers, steps, length);
          steps += length;
        }
        store(buffers, data + i * n * m, is_tall);
      }
    });
  });
}

} // namespace muon::detail
