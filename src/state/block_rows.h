#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "state/block_layout.h"
#include "state/codec.h"
#include "state/parts.h"
#include "state/strided_runs.h"

namespace muon::detail {

/// Values of a strided tensor in the order of its dims, run by run.
class ValueRuns {
 public:
  explicit ValueRuns(at::Tensor tensor)
      : tensor_(std::move(tensor)), runs_({&tensor_}, RunOrder::Dims) {}

  /// Values begin .. begin + n: a pointer into the tensor or into `buffer`.
  template <typename Compute>
  const Compute* load(std::int64_t begin, std::int64_t n, Compute* buffer) const {
    const Compute* result = buffer;
    std::int64_t at = 0;
    runs_.for_each(begin, begin + n, n, [&](const auto& offsets, std::int64_t length) {
      const Compute* run = load_run(
          tensor_.scalar_type(), tensor_.const_data_ptr(), offsets[0], runs_.run_strides()[0],
          length, buffer + at);
      if (length == n) {
        result = run;
      } else if (run != buffer + at) {
        std::copy_n(run, length, buffer + at);
      }
      at += length;
    });
    return result;
  }

  template <typename Compute>
  void store(std::int64_t begin, std::int64_t n, const Compute* values) const {
    std::int64_t at = 0;
    runs_.for_each(begin, begin + n, n, [&](const auto& offsets, std::int64_t length) {
      store_run(
          tensor_.scalar_type(), tensor_.mutable_data_ptr(), offsets[0], runs_.run_strides()[0],
          length, values + at);
      at += length;
    });
  }

 private:
  at::Tensor tensor_;
  StridedRuns<1> runs_;
};

/// The rows of one piece in units of at most kRun values, whole blocks each.
class BlockRows {
 public:
  struct Unit {
    std::int64_t begin; // of its values, in the piece
    std::int64_t row;
    std::int64_t first; // of its values, in the row
    std::int64_t length;
  };

  /// `sizes` [batch, lead..., side...] with `lead_dims` dims before the side.
  BlockRows(at::IntArrayRef sizes, std::int64_t lead_dims) {
    for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
      (static_cast<std::int64_t>(dim) < lead_dims ? rows_ : length_) *= sizes[dim];
    }
    row_units_ = (length_ + kRun - 1) / kRun;
  }

  std::int64_t units() const {
    return rows_ * row_units_;
  }
  std::int64_t length() const {
    return length_;
  }
  Unit unit(std::int64_t index) const {
    const std::int64_t row = index / row_units_;
    const std::int64_t first = index % row_units_ * kRun;
    return {row * length_ + first, row, first, std::min(kRun, length_ - first)};
  }

 private:
  std::int64_t rows_ = 1;
  std::int64_t length_ = 1;
  std::int64_t row_units_ = 0;
};

static_assert(kRun % kBlock == 0);

/// Quantised state read and written unit by unit.
class BlockCodec {
 public:
  BlockCodec(const BlockState& state, const BlockRows& rows)
      : format_(state.format),
        row_bytes_(code_bytes(state.format, rows.length())),
        row_blocks_(block_count(rows.length())),
        codes_(state.codes.view(at::kByte)),
        code_runs_({&codes_}, RunOrder::Dims),
        scales_(state.scales) {}

  void load(const BlockRows::Unit& unit, double* values) const {
    float buffer[kRun];
    load(unit, buffer);
    std::copy_n(buffer, unit.length, values);
  }
  void store(const BlockRows::Unit& unit, const double* values) const {
    float buffer[kRun];
    std::transform(values, values + unit.length, buffer, [](double value) {
      return static_cast<float>(value);
    });
    store(unit, buffer);
  }

  void load(const BlockRows::Unit& unit, float* values) const {
    std::uint8_t buffer[kRun];
    float scales[kRun / kBlock];
    decode_blocks(
        format_, codes(unit, buffer),
        scales_.load(first_block(unit), block_count(unit.length), scales), unit.length, values);
  }

  void store(const BlockRows::Unit& unit, const float* values) const {
    std::uint8_t buffer[kRun];
    float scales[kRun / kBlock];
    encode_blocks(format_, values, unit.length, buffer, scales);
    scales_.store(first_block(unit), block_count(unit.length), scales);
    std::int64_t at = 0;
    for_codes(unit, [&](std::uint8_t* data, std::int64_t stride, std::int64_t n) {
      for (std::int64_t i = 0; i < n; ++i) {
        data[i * stride] = buffer[at++];
      }
    });
  }

 private:
  std::int64_t first_block(const BlockRows::Unit& unit) const {
    return unit.row * row_blocks_ + unit.first / kBlock;
  }

  template <typename Visit>
  void for_codes(const BlockRows::Unit& unit, Visit&& visit) const {
    const std::int64_t n = code_bytes(format_, unit.length);
    const std::int64_t begin = unit.row * row_bytes_ + code_bytes(format_, unit.first);
    auto* const data = static_cast<std::uint8_t*>(codes_.mutable_data_ptr());
    code_runs_.for_each(begin, begin + n, n, [&](const auto& offsets, std::int64_t length) {
      visit(data + offsets[0], code_runs_.run_strides()[0], length);
    });
  }

  const std::uint8_t* codes(const BlockRows::Unit& unit, std::uint8_t* buffer) const {
    const std::int64_t n = code_bytes(format_, unit.length);
    const std::uint8_t* result = buffer;
    std::int64_t at = 0;
    for_codes(unit, [&](const std::uint8_t* data, std::int64_t stride, std::int64_t length) {
      if (stride == 1 && length == n) {
        result = data;
        return;
      }
      for (std::int64_t i = 0; i < length; ++i) {
        buffer[at++] = data[i * stride];
      }
    });
    return result;
  }

  StateFormat format_;
  std::int64_t row_bytes_;
  std::int64_t row_blocks_;
  at::Tensor codes_;
  StridedRuns<1> code_runs_;
  ValueRuns scales_;
};

/// Runs `visit(piece, unit)` over all units of all pieces, spread over the threads.
template <typename Visit>
void for_each_unit(const std::vector<BlockRows>& pieces, const Visit& visit) {
  constexpr std::int64_t kGrain = 32; // units: 32768 values
  std::vector<std::int64_t> sizes;
  for (const BlockRows& piece : pieces) {
    sizes.push_back(piece.units());
  }
  for_each_part(sizes, kGrain, [&](std::size_t piece, std::int64_t first, std::int64_t last) {
    for (std::int64_t unit = first; unit < last; ++unit) {
      visit(piece, pieces[piece].unit(unit));
    }
  });
}

} // namespace muon::detail
