#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <muon/export.h>

namespace muon {

/// One state tensor that an algorithm keeps for each parameter.
struct MUON_API StateSlot {
  enum class Kind : std::uint8_t {
    LikeParam, ///< the parameter's shape and strides, dtype by `state_dtype`
    PerRow, ///< float32 (float64 where the parameter is), one value a row of
    ///< each matrix: [batch..., rows, k]
    ///< with k the number of column blocks (1 unless split by columns)
    Step, ///< 0-d float32 on the CPU, counts steps with a gradient: matrix
    ///< algorithms find it counted, an elementwise `update` counts itself
  };
  std::string name; ///< key in the state dict
  Kind kind = Kind::LikeParam;
  friend bool operator==(const StateSlot&, const StateSlot&) = default;
};

/// A number that each group of an algorithm has, beside the options of all.
struct MUON_API AlgorithmOption {
  std::string name;
  double value = 0.0; ///< where a group does not say
  friend bool operator==(const AlgorithmOption&, const AlgorithmOption&) = default;
};

/// An algorithm is its state and the dispatcher ops ("namespace::name") that
/// carry out its stages; the executor calls them through the dispatcher, so a
/// stage may be written in C++, in a library of the user's, or in Python.
///
/// Matrix algorithms have four stages. `pieces` are equal matrices, one tensor
/// [batch, rows, cols] each, complex where the weight is or has a complex_dim;
/// `groups[i]` is the row of `hyper` (columns: `muon::Hyper`) of piece i. They
/// are written in place: one that is resized or replaced is an error.
///
///   accumulate (Tensor[] grads, Tensor(a!)[] state, Tensor(b!)[] matrices,
///               Tensor hyper, int[] groups, Tensor? grad_scale) -> ()
///   orthogonalize (Tensor(a!) matrices, Tensor hyper, int[] groups,
///               str spec) -> ()            matrices [count, rows, cols]
///   refine     (Tensor(a!)[] matrices, Tensor(b!)[] state, Tensor hyper,
///               int[] groups) -> ()        empty name: no such stage
///   apply      (Tensor(a!)[] params, Tensor[] matrices, Tensor hyper,
///               int[] groups, float[] factors) -> ()
///
/// or a single one that does all of it, `factors` being the shape factors of
/// the learning rate:
///
///   matrix_update (Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] state,
///               Tensor hyper, int[] groups, float[] factors,
///               Tensor? grad_scale, str spec) -> ()
///
/// Elementwise algorithms are one pass over whole parameters:
///
///   update     (Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] state,
///               Tensor hyper, int[] groups, Tensor? grad_scale,
///               str spec) -> ()
///
/// `state` holds the slots of all pieces or parameters, piece by piece.
/// accumulate sees the first slot of each piece, refine the remaining ones.
/// The algorithm's own options are the columns of `hyper` from Hyper::kCount on,
/// in the order of `options`.
struct MUON_API Algorithm {
  std::string name;
  std::vector<StateSlot> state;
  std::vector<AlgorithmOption> options;
  std::string accumulate = "muon::accumulate_";
  std::string orthogonalize = "muon::orthogonalize_";
  std::string refine;
  std::string apply = "muon::apply_";
  std::string matrix_update; ///< non-empty: in place of the four above
  std::string update; ///< non-empty: elementwise, all of the above are unused
  bool is_elementwise() const {
    return !update.empty();
  }
  friend bool operator==(const Algorithm&, const Algorithm&) = default;
};

/// Adds `algorithm` to the process-wide registry; names are compared in lower
/// case. Throws ValueError when an op does not exist, when two slots or options
/// share a name, or when the name is taken by a different algorithm, unless that
/// is not one of libmuon's and `replace` is true: plans made before keep it.
MUON_API void register_algorithm(Algorithm algorithm, bool replace = false);

/// The algorithm of that name in any case; ValueError listing the names else.
MUON_API const Algorithm& find_algorithm(std::string_view name);

/// All names, sorted.
MUON_API std::vector<std::string> registered_algorithms();

} // namespace muon
