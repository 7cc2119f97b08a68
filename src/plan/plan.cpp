#include "plan/plan.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <tuple>
#include <utility>

namespace muon::plan {
namespace {

using ShapeKey = std::tuple<std::string, std::int64_t, std::int64_t>;

// Indices of the items of each kind and shape, buckets in order of appearance.
std::vector<std::vector<std::int64_t>> bucket(const std::vector<Item>& items) {
  std::map<ShapeKey, std::size_t> index;
  std::vector<std::vector<std::int64_t>> buckets;
  for (std::size_t i = 0; i < items.size(); ++i) {
    const Item& item = items[i];
    if (item.batch == 0 || item.rows == 0 || item.cols == 0) {
      continue;
    }
    const auto [at, is_new] =
        index.try_emplace(ShapeKey{item.kind, item.rows, item.cols}, buckets.size());
    if (is_new) {
      buckets.emplace_back();
    }
    buckets[at->second].push_back(static_cast<std::int64_t>(i));
  }
  return buckets;
}

std::int64_t capacity(const Item& item, std::int64_t max_bytes) {
  const std::int64_t by_bytes =
      std::max<std::int64_t>(1, max_bytes / std::max<std::int64_t>(1, item.bytes_per_matrix));
  return item.max_matrices > 0 ? std::min(by_bytes, item.max_matrices) : by_bytes;
}

} // namespace

Plan build_plan(std::vector<Item> items, std::int64_t max_bytes) {
  Plan plan;
  for (const auto& members : bucket(items)) {
    const std::int64_t limit =
        capacity(items[static_cast<std::size_t>(members.front())], max_bytes);
    Chunk chunk;
    for (const std::int64_t index : members) {
      const std::int64_t batch = items[static_cast<std::size_t>(index)].batch;
      for (std::int64_t first = 0; first < batch;) {
        const std::int64_t count = std::min(batch - first, limit - chunk.matrices);
        chunk.pieces.push_back({index, first, count});
        chunk.matrices += count;
        first += count;
        if (chunk.matrices == limit) {
          plan.chunks.push_back(std::exchange(chunk, {}));
        }
      }
    }
    if (chunk.matrices > 0) {
      plan.chunks.push_back(std::move(chunk));
    }
  }
  plan.items = std::move(items);
  return plan;
}

double predicted_flop(std::int64_t rows, std::int64_t cols, std::int64_t steps) {
  const double n = static_cast<double>(std::min(rows, cols));
  const double m = static_cast<double>(std::max(rows, cols));
  // In units of n^3: four symmetric products a step less three, one symmetric
  // and one full product with the long side.
  const double square_products = std::max(0.0, 4.0 * static_cast<double>(steps) - 3.0);
  return n * n * (square_products * n + 3.0 * m);
}

std::string explain(const Plan& plan) {
  std::ostringstream out;
  for (std::size_t i = 0; i < plan.chunks.size(); ++i) {
    const Chunk& chunk = plan.chunks[i];
    const Item& item = plan.items[static_cast<std::size_t>(chunk.pieces.front().item)];
    const double mib =
        static_cast<double>(item.bytes_per_matrix * chunk.matrices) / (1024.0 * 1024.0);
    out << "chunk " << i << ": " << chunk.matrices << " x [" << item.rows << ", " << item.cols
        << "], " << mib << " MiB, " << item.kind << ":";
    for (const Piece& piece : chunk.pieces) {
      const Item& owner = plan.items[static_cast<std::size_t>(piece.item)];
      out << ' ' << owner.name;
      if (piece.count != owner.batch) {
        out << '[' << piece.first << ':' << piece.first + piece.count << ']';
      }
    }
    out << '\n';
  }
  return out.str();
}

} // namespace muon::plan
