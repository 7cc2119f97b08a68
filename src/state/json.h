#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <muon/export.h>

/// JSON as the state file needs it: a cursor that reads text of a known form
/// piece by piece, and a small tree for text of any form.
namespace muon::detail {

/// Index of the first byte that is not part of valid UTF-8, or npos.
std::size_t invalid_utf8(std::string_view text);

/// `text` as a JSON string, with its quotes. Non-ASCII characters stay as they
/// are.
void append_json_string(std::string& out, std::string_view text);

/// `text` for an error message: as a JSON string, cut to 120 bytes, always
/// valid UTF-8.
std::string quoted(std::string_view text);

/// What an error of JsonCursor says around "at byte 17: expected ':'".
struct JsonContext {
  std::string before; ///< such as: muon: cannot read "x": the header
  std::string after; ///< the way out
};

/// Reads JSON text from front to back. Every function skips white space first
/// and raises ValueError for text of another form; the text must be valid
/// UTF-8.
class JsonCursor {
 public:
  /// Both arguments must outlive the cursor.
  JsonCursor(std::string_view text, const JsonContext& context) : text_(text), context_(context) {}

  /// The next byte, which stays; NUL at the end.
  char peek();
  /// Takes `character` if it comes next.
  bool accept(char character);
  void expect(char character);
  /// A string, decoded.
  std::string string();
  /// The text between a string's quotes as it stands, a view of the text.
  std::string_view raw_string();
  /// A number that is not negative and has neither fraction nor exponent.
  std::uint64_t whole_number();
  /// A number's text, in JSON's grammar.
  std::string_view number();
  /// A word without quotes, such as true.
  std::string_view word();
  /// Only white space may follow.
  void end();

  std::size_t position() const {
    return position_;
  }
  [[noreturn]] void fail(std::string_view what) const;

 private:
  void skip_space();
  std::size_t skip_digits();
  void append_escape(std::string& out, std::string_view raw, std::size_t& index) const;
  std::uint32_t hex_unit(std::string_view raw, std::size_t index) const;
  [[noreturn]] void expected(std::string_view what) const;

  std::string_view text_;
  const JsonContext& context_;
  std::size_t position_ = 0;
};

/// A JSON value. Numbers without fraction and exponent are integers, the others
/// doubles; objects keep the order of their members.
class MUON_API Json {
 public:
  using Array = std::vector<Json>;
  using Object = std::vector<std::pair<std::string, Json>>;

  static constexpr int kMaxDepth = 16;
  /// Bounds what a short text of many small values can take (some 40 MB).
  static constexpr std::size_t kMaxValues = std::size_t{256} * 1024;

  Json() = default; ///< null
  Json(bool value) : value_(value) {}
  Json(int value) : value_(std::int64_t{value}) {}
  Json(std::int64_t value) : value_(value) {}
  Json(double value) : value_(value) {}
  Json(const char* value) : value_(std::string(value)) {}
  Json(std::string value) : value_(std::move(value)) {}
  Json(Array value) : value_(std::move(value)) {}
  Json(Object value) : value_(std::move(value)) {}

  /// Reads one value. ValueError, as CONTEXT.before " is not valid at byte N:
  /// ..." CONTEXT.after, for anything but strict JSON in UTF-8, for a member
  /// that occurs twice, for nesting deeper than kMaxDepth, more than kMaxValues
  /// values, integers beyond 64 bits and numbers beyond a double.
  static Json parse(std::string_view text, const JsonContext& context);

  /// Without white space; doubles in the fewest digits that read back the same.
  /// ValueError for NaN, infinities, invalid UTF-8 and more than kMaxDepth
  /// levels. An object's keys must be distinct.
  std::string dump() const;

  /// The value if it is of this type, else null. An integer is no double.
  template <typename T>
  const T* get_if() const {
    return std::get_if<T>(&value_);
  }
  bool is_null() const {
    return std::holds_alternative<std::monostate>(value_);
  }
  /// The member `key` of an object; null if there is none or this is no object.
  const Json* find(std::string_view key) const;
  /// "a string", "an object" and so on, for error messages.
  std::string_view kind() const;

  bool operator==(const Json& other) const = default;

 private:
  std::variant<std::monostate, bool, std::int64_t, double, std::string, Array, Object> value_;
};

} // namespace muon::detail
