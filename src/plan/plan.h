#pragma once

#include <cstdint>
#include <string>
#include <vector>

/// Which matrices are computed together. This room knows numbers and names
/// only; tensors appear in src/step_plan.h.
namespace muon::plan {

/// A batch of equal matrices inside one parameter, computed in one piece or
/// cut along its batch.
struct Item {
  std::string name; // for explain()
  std::string kind; // items of different kinds never share a chunk
  std::int64_t batch = 1;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t bytes_per_matrix = 0; // in the workspace
  std::int64_t max_matrices = 0; // a chunk holds at most this many; 0: no limit
};

/// Matrices first .. first + count of one item.
struct Piece {
  std::int64_t item = 0;
  std::int64_t first = 0;
  std::int64_t count = 0;
  bool operator==(const Piece&) const = default;
};

/// Pieces of equal matrices that share one workspace and one call of each stage.
struct Chunk {
  std::vector<Piece> pieces;
  std::int64_t matrices = 0;
};

struct Plan {
  std::vector<Item> items;
  std::vector<Chunk> chunks;
};

/// Groups items of one kind and shape, in order of first appearance, and cuts
/// each group into chunks of at most `max_bytes` (one matrix at least).
Plan build_plan(std::vector<Item> items, std::int64_t max_bytes);

/// Products that orthogonalizing one rows x cols matrix takes, in FLOP, by the
/// Gram form with symmetric products: the unit in which chunks are compared.
double predicted_flop(std::int64_t rows, std::int64_t cols, std::int64_t steps);

/// One line a chunk: how many matrices, their shape and kind, whose they are.
std::string explain(const Plan& plan);

} // namespace muon::plan
