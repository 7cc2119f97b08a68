#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

namespace gpt {

/// Loss, tokens per second and time left on stderr: one line that redraws
/// itself on a terminal, a line every 50 steps elsewhere.
class Progress {
 public:
  Progress(std::int64_t steps, std::int64_t tokens_per_step)
      : steps_(steps), tokens_per_step_(tokens_per_step) {}

  void update(std::int64_t step, double train_loss, double validation_loss) const {
    if (!terminal_ && step % 50 != 0 && step != steps_) {
      return;
    }
    const std::chrono::duration<double> elapsed = Clock::now() - start_;
    const double rate = static_cast<double>(step) / elapsed.count();
    const auto seconds_left = static_cast<long>(static_cast<double>(steps_ - step) / rate);
    const auto filled = static_cast<std::size_t>(kWidth * step / steps_);
    const std::string bar = std::string(filled, '#') + std::string(kWidth - filled, '.');
    std::fprintf(
        stderr, "%s%s %ld/%ld  loss %.3f  val %.3f  %.1f ktok/s  ETA %ld:%02ld %s",
        terminal_ ? "\r" : "", bar.c_str(), static_cast<long>(step), static_cast<long>(steps_),
        train_loss, validation_loss, rate * static_cast<double>(tokens_per_step_) / 1e3,
        seconds_left / 60, seconds_left % 60, terminal_ && step != steps_ ? "" : "\n");
    std::fflush(stderr);
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::int64_t kWidth = 20;

  std::int64_t steps_;
  std::int64_t tokens_per_step_;
  bool terminal_ = isatty(STDERR_FILENO) != 0;
  Clock::time_point start_ = Clock::now();
};

} // namespace gpt
