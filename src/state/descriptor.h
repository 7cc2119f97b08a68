#pragma once

#include <unistd.h>

#include <utility>

namespace muon::detail {

/// An open file, closed at the end of the scope.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (is_open()) {
      ::close(number_);
    }
  }

  bool is_open() const {
    return number_ >= 0;
  }
  int get() const {
    return number_;
  }
  /// Hands the number over to somebody who closes it.
  int release() {
    return std::exchange(number_, -1);
  }

 private:
  int number_;
};

} // namespace muon::detail
