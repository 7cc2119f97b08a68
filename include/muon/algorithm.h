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
    Step, ///< 0-d float32 on the CPU, counts steps
  };
  std::string name; ///< key in the state dict
  Kind kind = Kind::LikeParam;
};

/// An algorithm is its state and the dispatcher ops ("namespace::name") that
/// carry out its stages; the executor calls them through the dispatcher, so a
/// stage may be written in C++, in a library of the user's, or in Python.
///
/// Matrix algorithms have four stages. `pieces` are equal matrices, one tensor
/// [batch..., rows..., cols...] each, all of one shape up to their sides'
/// order; `groups[i]` is the row of `hyper` (columns: `muon::Hyper`) of piece i.
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
/// Elementwise algorithms are one pass over whole parameters:
///
///   update     (Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] state,
///               Tensor hyper, int[] groups, Tensor? grad_scale,
///               str spec) -> ()
///
/// `state` holds the slots of all pieces or parameters, piece by piece.
/// accumulate sees the first slot of each piece, refine the remaining ones.
struct MUON_API Algorithm {
  std::string name;
  std::vector<StateSlot> state;
  std::string accumulate = "muon::accumulate_";
  std::string orthogonalize = "muon::orthogonalize_";
  std::string refine;
  std::string apply = "muon::apply_";
  std::string update; ///< non-empty: elementwise, the four above are unused
  bool is_elementwise() const {
    return !update.empty();
  }
};

/// Adds `algorithm` to the process-wide registry; names are compared in lower
/// case. Throws ValueError when the name is taken by a different algorithm or
/// an op does not exist.
MUON_API void register_algorithm(Algorithm algorithm);

/// The algorithm of that name in any case; ValueError listing the names else.
MUON_API const Algorithm& find_algorithm(std::string_view name);

/// All names, sorted.
MUON_API std::vector<std::string> registered_algorithms();

} // namespace muon
