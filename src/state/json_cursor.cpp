#include <algorithm>
#include <charconv>

#include <c10/util/Exception.h>

#include "state/json.h"

namespace muon::detail {
namespace {

constexpr std::size_t kQuotedBytes = 120;

bool is_digit(char character) {
  return character >= '0' && character <= '9';
}

bool is_continuation(char character) {
  const auto byte = static_cast<unsigned char>(character);
  return byte >= 0x80 && byte < 0xC0;
}

// Bytes of the UTF-8 sequence at the front of `text`, 0 if it is not valid.
std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) {
    return 1;
  }
  const std::size_t length = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || text.size() < length) {
    return 0;
  }
  for (std::size_t i = 1; i < length; ++i) {
    if (!is_continuation(text[i])) {
      return 0;
    }
  }
  // Longer than needed, surrogates, and beyond U+10FFFF.
  const bool refused = (first == 0xE0 && byte(1) < 0xA0) || (first == 0xED && byte(1) > 0x9F) ||
      (first == 0xF0 && byte(1) < 0x90) || (first == 0xF4 && byte(1) > 0x8F);
  return refused ? 0 : length;
}

void append_utf8(std::string& out, std::uint32_t code) {
  const auto put = [&](std::uint32_t byte) { out.push_back(static_cast<char>(byte)); };
  const auto put_rest = [&](std::uint32_t unit) { put(0x80 + code / unit % 64); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xC0 + code / 64);
    put_rest(1);
  } else if (code < 0x10000) {
    put(0xE0 + code / 4096);
    put_rest(64);
    put_rest(1);
  } else {
    put(0xF0 + code / 262144);
    put_rest(4096);
    put_rest(64);
    put_rest(1);
  }
}

} // namespace

std::size_t invalid_utf8(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t length = utf8_length(text.substr(i, 4));
    if (length == 0) {
      return i;
    }
    i += length;
  }
  return std::string_view::npos;
}

void append_json_string(std::string& out, std::string_view text) {
  constexpr std::string_view kHex = "0123456789abcdef";
  out.push_back('"');
  for (const char character : text) {
    const auto byte = static_cast<unsigned char>(character);
    if (character == '"' || character == '\\') {
      out.push_back('\\');
      out.push_back(character);
    } else if (character == '\n') {
      out += "\\n";
    } else if (byte < 0x20) {
      out += "\\u00";
      out.push_back(kHex[byte / 16]);
      out.push_back(kHex[byte % 16]);
    } else {
      out.push_back(character);
    }
  }
  out.push_back('"');
}

std::string quoted(std::string_view text) {
  std::string shown(text.substr(0, kQuotedBytes));
  if (shown.size() < text.size()) {
    while (!shown.empty() && is_continuation(text[shown.size()])) {
      shown.pop_back();
    }
    shown += "...";
  }
  for (std::size_t bad = invalid_utf8(shown); bad != std::string::npos; bad = invalid_utf8(shown)) {
    shown[bad] = '?';
  }
  std::string out;
  append_json_string(out, shown);
  return out;
}

void JsonCursor::fail(std::string_view what) const {
  TORCH_CHECK_VALUE(
      false, context_.before, " is not valid at byte ", position_, ": ", what, context_.after);
}

void JsonCursor::expected(std::string_view what) const {
  const std::string found =
      position_ < text_.size() ? quoted(text_.substr(position_, 1)) : std::string("the end");
  fail(c10::str("expected ", what, ", got ", found));
}

void JsonCursor::skip_space() {
  position_ = std::min(text_.find_first_not_of(" \t\n\r", position_), text_.size());
}

char JsonCursor::peek() {
  skip_space();
  return position_ < text_.size() ? text_[position_] : '\0';
}

bool JsonCursor::accept(char character) {
  skip_space();
  if (position_ == text_.size() || text_[position_] != character) {
    return false;
  }
  ++position_;
  return true;
}

void JsonCursor::expect(char character) {
  if (!accept(character)) {
    expected(std::string{'\'', character, '\''});
  }
}

void JsonCursor::end() {
  skip_space();
  if (position_ != text_.size()) {
    expected("the end");
  }
}

std::string_view JsonCursor::raw_string() {
  if (!accept('"')) {
    expected("a string in quotes");
  }
  const std::size_t begin = position_;
  for (; position_ < text_.size(); ++position_) {
    const char character = text_[position_];
    if (character == '"') {
      return text_.substr(begin, position_++ - begin);
    }
    if (static_cast<unsigned char>(character) < 0x20) {
      fail("a control character in a string");
    }
    position_ += character == '\\' ? 1 : 0;
  }
  position_ = text_.size();
  fail("a string that does not end");
}

std::string JsonCursor::string() {
  const std::string_view raw = raw_string();
  std::string out;
  out.reserve(raw.size());
  for (std::size_t i = 0; i < raw.size();) {
    const std::size_t escape = std::min(raw.find('\\', i), raw.size());
    out.append(raw, i, escape - i);
    i = escape;
    if (i < raw.size()) {
      append_escape(out, raw, i);
    }
  }
  return out;
}

// The escape sequence at raw[index], which moves behind it.
void JsonCursor::append_escape(std::string& out, std::string_view raw, std::size_t& index) const {
  constexpr std::string_view kEscapes = "\"\\/bfnrt";
  constexpr std::string_view kMeanings = "\"\\/\b\f\n\r\t";
  const char kind = raw[index + 1];
  if (kind != 'u') {
    const std::size_t which = kEscapes.find(kind);
    if (which == std::string_view::npos) {
      fail("an unknown escape sequence in the string before this place");
    }
    out.push_back(kMeanings[which]);
    index += 2;
    return;
  }
  std::uint32_t code = hex_unit(raw, index);
  index += 6;
  if (code >= 0xD800 && code < 0xE000) {
    const std::uint32_t low = code < 0xDC00 ? hex_unit(raw, index) : 0;
    if (low < 0xDC00 || low >= 0xE000) {
      fail("half a surrogate pair in the string before this place");
    }
    code = 0x10000 + (code - 0xD800) * 0x400 + (low - 0xDC00);
    index += 6;
  }
  append_utf8(out, code);
}

// The number in \uXXXX at raw[index].
std::uint32_t JsonCursor::hex_unit(std::string_view raw, std::size_t index) const {
  std::uint32_t code = 0;
  const std::string_view unit = index < raw.size() ? raw.substr(index, 6) : std::string_view();
  const char* end = unit.data() + unit.size();
  if (unit.size() != 6 || unit.substr(0, 2) != "\\u" ||
      std::from_chars(unit.data() + 2, end, code, 16).ptr != end) {
    fail("a \\u without four hexadecimal digits in the string before this place");
  }
  return code;
}

std::size_t JsonCursor::skip_digits() {
  const std::size_t begin = position_;
  while (position_ < text_.size() && is_digit(text_[position_])) {
    ++position_;
  }
  return position_ - begin;
}

std::string_view JsonCursor::number() {
  skip_space();
  const std::size_t begin = position_;
  const auto take = [&](std::string_view choice) {
    const bool found =
        position_ < text_.size() && choice.find(text_[position_]) != std::string_view::npos;
    position_ += found ? 1 : 0;
    return found;
  };
  take("-");
  const bool leading_zero = position_ < text_.size() && text_[position_] == '0';
  const std::size_t digits = skip_digits();
  if (digits == 0 || (leading_zero && digits > 1)) {
    expected(digits == 0 ? "a number" : "a number without leading zeros");
  }
  if (take(".") && skip_digits() == 0) {
    expected("a digit after the decimal point");
  }
  if (take("eE")) {
    take("+-");
    if (skip_digits() == 0) {
      expected("a digit of the exponent");
    }
  }
  return text_.substr(begin, position_ - begin);
}

std::uint64_t JsonCursor::whole_number() {
  const std::string_view text = number();
  std::uint64_t value = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (stop != text.data() + text.size() || error != std::errc()) {
    fail(c10::str("expected a whole number of at most 64 bits, got ", quoted(text)));
  }
  return value;
}

std::string_view JsonCursor::word() {
  skip_space();
  const std::size_t begin = position_;
  while (position_ < text_.size() && text_[position_] >= 'a' && text_[position_] <= 'z') {
    ++position_;
  }
  return text_.substr(begin, position_ - begin);
}

} // namespace muon::detail
