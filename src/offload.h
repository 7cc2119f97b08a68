#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include "step_views.h"

namespace muon::detail {

/// The state of one piece of work, in host memory and where it is worked on.
struct FetchedState {
  std::vector<StateView> host, device;
  std::optional<c10::Event> ready; // on a device with streams
};

/// Moves state that lives in host memory to a device and back, on a stream of
/// its own where the device has streams: fetch the next while one is in use.
/// On a CPU the same with plain copies. Counts of steps stay where they are.
class StateStream {
 public:
  explicit StateStream(c10::Device device);

  FetchedState fetch(const std::vector<StateView>& host) const;
  /// Call before the first use of `state.device`.
  void wait(const FetchedState& state) const;
  /// Writes `state.device` back.
  void store(const FetchedState& state) const;
  /// Returns when the host sees everything that was stored.
  void finish() const;

 private:
  c10::Device device_;
  std::optional<c10::Stream> stream_;
};

/// The streams of one step, one a device.
class StateStreams {
 public:
  StateStream& on(c10::Device device);
  void finish() const;

 private:
  std::map<std::string, StateStream> streams_; // by the device's name
};

/// Views for the stages, of which the state is fetched from host memory where
/// the group says so.
class OffloadedViews {
 public:
  OffloadedViews(const Step& step, const std::vector<ActivePiece>& active);

  /// The views, once their state is there.
  const ChunkViews& use();
  void store();

 private:
  ChunkViews views_;
  StateStream* stream_ = nullptr;
  FetchedState fetched_;
};

} // namespace muon::detail
