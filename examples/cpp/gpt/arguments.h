#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>

namespace gpt {

/// What a run is made of; the same options as examples/python/train_gpt.py.
struct Arguments {
  std::string corpus = "out/demo/corpus";
  std::string out; ///< JSON lines, one a step
  std::string optimizer = "muon";
  double lr = 0.0; ///< peak learning rate
  std::int64_t steps = 500;
  std::int64_t seed = 0;
  std::int64_t batch = 16;
  std::int64_t context = 128;
  std::int64_t layers = 4;
  std::int64_t width = 128;
  std::int64_t heads = 4;
  std::int64_t eval_every = 25;
  std::int64_t eval_batches = 8;
  std::int64_t threads = 2;
};

namespace detail {

using Setter = std::function<void(const std::string&)>;

/// Stores a whole text as a number: "5x" and "" are refused.
template <typename Number, typename Parse>
Setter number(Number& field, Parse parse) {
  return [&field, parse](const std::string& text) {
    std::size_t used = 0;
    field = parse(text, &used);
    if (used != text.size()) {
      throw std::invalid_argument(text);
    }
  };
}

inline Setter setter(std::int64_t& field) {
  return number(
      field, [](const std::string& text, std::size_t* used) { return std::stoll(text, used); });
}

inline Setter setter(double& field) {
  return number(
      field, [](const std::string& text, std::size_t* used) { return std::stod(text, used); });
}

inline Setter setter(std::string& field) {
  return [&field](const std::string& text) { field = text; };
}

inline std::map<std::string, Setter> setters(Arguments& args) {
  return {
      {"--corpus", setter(args.corpus)},
      {"--out", setter(args.out)},
      {"--optimizer", setter(args.optimizer)},
      {"--lr", setter(args.lr)},
      {"--steps", setter(args.steps)},
      {"--seed", setter(args.seed)},
      {"--batch", setter(args.batch)},
      {"--context", setter(args.context)},
      {"--layers", setter(args.layers)},
      {"--width", setter(args.width)},
      {"--heads", setter(args.heads)},
      {"--eval-every", setter(args.eval_every)},
      {"--eval-batches", setter(args.eval_batches)},
      {"--threads", setter(args.threads)},
  };
}

} // namespace detail

/// Reads "--key value" pairs; throws std::invalid_argument that says what is wrong.
inline Arguments parse_arguments(int argc, const char* const* argv) {
  Arguments args;
  const auto setters = detail::setters(args);
  for (int i = 1; i < argc; i += 2) {
    const std::string key = argv[i];
    const auto found = setters.find(key);
    if (found == setters.end()) {
      std::string known;
      for (const auto& [name, unused] : setters) {
        known += " " + name;
      }
      throw std::invalid_argument("unknown option " + key + "; expected one of" + known);
    }
    if (i + 1 == argc) {
      throw std::invalid_argument(key + " needs a value");
    }
    try {
      found->second(argv[i + 1]);
    } catch (const std::logic_error&) {
      throw std::invalid_argument(key + ": expected a number, got " + argv[i + 1]);
    }
  }
  if (args.optimizer != "muon" && args.optimizer != "adamw") {
    throw std::invalid_argument("--optimizer: expected muon or adamw, got " + args.optimizer);
  }
  if (args.out.empty() || args.lr <= 0.0) {
    throw std::invalid_argument("--out and a positive --lr are required");
  }
  return args;
}

} // namespace gpt
