#include "state/json.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <type_traits>

#include <c10/util/Exception.h>

namespace muon::detail {
namespace {

Json number_from(std::string_view text, const JsonCursor& cursor) {
  // "-0" is a double, since no integer has its sign.
  if (text != "-0" && text.find_first_of(".eE") == std::string_view::npos) {
    std::int64_t value = 0;
    if (std::from_chars(text.data(), text.data() + text.size(), value).ec != std::errc()) {
      cursor.fail(c10::str("the integer ", quoted(text), " does not fit 64 bits"));
    }
    return value;
  }
  double value = 0;
  if (std::from_chars(text.data(), text.data() + text.size(), value).ec != std::errc()) {
    cursor.fail(c10::str("the number ", quoted(text), " does not fit a double"));
  }
  return value;
}

class TreeReader {
 public:
  explicit TreeReader(JsonCursor& cursor) : cursor_(cursor) {}

  Json value(int depth) {
    if (++values_ > Json::kMaxValues) {
      cursor_.fail(c10::str("more than ", Json::kMaxValues, " values"));
    }
    const char next = cursor_.peek();
    if ((next == '{' || next == '[') && depth == Json::kMaxDepth) {
      cursor_.fail(c10::str("nested deeper than ", Json::kMaxDepth));
    }
    switch (next) {
      case '{':
        return object(depth + 1);
      case '[':
        return array(depth + 1);
      case '"':
        return cursor_.string();
      case 't':
      case 'f':
      case 'n':
        return constant();
      default:
        return number_from(cursor_.number(), cursor_);
    }
  }

 private:
  Json array(int depth) {
    Json::Array items;
    cursor_.expect('[');
    if (cursor_.accept(']')) {
      return items;
    }
    do {
      items.push_back(value(depth));
    } while (cursor_.accept(','));
    cursor_.expect(']');
    return items;
  }

  Json object(int depth) {
    Json::Object members;
    cursor_.expect('{');
    if (cursor_.accept('}')) {
      return members;
    }
    do {
      std::string key = cursor_.string();
      cursor_.expect(':');
      members.emplace_back(std::move(key), value(depth));
    } while (cursor_.accept(','));
    cursor_.expect('}');
    check_distinct(members);
    return members;
  }

  void check_distinct(const Json::Object& members) const {
    std::vector<std::string_view> keys;
    keys.reserve(members.size());
    for (const auto& [key, value] : members) {
      keys.push_back(key);
    }
    std::sort(keys.begin(), keys.end());
    const auto twice = std::adjacent_find(keys.begin(), keys.end());
    if (twice != keys.end()) {
      cursor_.fail(c10::str("the object that ends here has ", quoted(*twice), " twice"));
    }
  }

  Json constant() {
    const std::string_view word = cursor_.word();
    if (word == "true") {
      return true;
    }
    if (word == "false") {
      return false;
    }
    if (word != "null") {
      cursor_.fail(c10::str("expected a value, got ", quoted(word)));
    }
    return {};
  }

  JsonCursor& cursor_;
  std::size_t values_ = 0;
};

std::string text_of(double value) {
  TORCH_CHECK_VALUE(
      std::isfinite(value), "muon: expected a finite number, got ", value,
      " (JSON has no other: write it as a string)");
  std::array<char, 32> digits;
  const auto result = std::to_chars(digits.data(), digits.data() + digits.size(), value);
  std::string text(digits.data(), result.ptr);
  // So that it is read back as a double.
  if (text.find_first_of(".e") == std::string::npos) {
    text += ".0";
  }
  return text;
}

void append(std::string& out, const Json& json, int depth);

void append(std::string& out, std::string_view text) {
  const std::size_t bad = invalid_utf8(text);
  TORCH_CHECK_VALUE(
      bad == std::string_view::npos, "muon: expected UTF-8, got ", quoted(text),
      " with another byte at ", bad);
  append_json_string(out, text);
}

template <typename Items, typename Each>
void append_list(
    std::string& out, const Items& items, int depth, std::string_view ends, Each each) {
  TORCH_CHECK_VALUE(
      depth < Json::kMaxDepth, "muon: expected JSON of at most ", Json::kMaxDepth,
      " levels, got more");
  out.push_back(ends[0]);
  for (const auto& item : items) {
    if (&item != &items.front()) {
      out.push_back(',');
    }
    each(item);
  }
  out.push_back(ends[1]);
}

void append(std::string& out, const Json& json, int depth) {
  if (const auto* text = json.get_if<std::string>()) {
    append(out, *text);
  } else if (const auto* array = json.get_if<Json::Array>()) {
    append_list(out, *array, depth, "[]", [&](const Json& item) { append(out, item, depth + 1); });
  } else if (const auto* object = json.get_if<Json::Object>()) {
    append_list(out, *object, depth, "{}", [&](const auto& member) {
      append(out, member.first);
      out.push_back(':');
      append(out, member.second, depth + 1);
    });
  } else if (const auto* integer = json.get_if<std::int64_t>()) {
    out += std::to_string(*integer);
  } else if (const auto* number = json.get_if<double>()) {
    out += text_of(*number);
  } else if (const auto* flag = json.get_if<bool>()) {
    out += *flag ? "true" : "false";
  } else {
    out += "null";
  }
}

} // namespace

Json Json::parse(std::string_view text, const JsonContext& context) {
  const std::size_t bad = invalid_utf8(text);
  TORCH_CHECK_VALUE(
      bad == std::string_view::npos, context.before, " is not valid at byte ", bad, ": not UTF-8",
      context.after);
  JsonCursor cursor(text, context);
  Json value = TreeReader(cursor).value(0);
  cursor.end();
  return value;
}

std::string Json::dump() const {
  std::string out;
  append(out, *this, 0);
  return out;
}

const Json* Json::find(std::string_view key) const {
  const auto* object = get_if<Object>();
  if (object == nullptr) {
    return nullptr;
  }
  const auto found = std::find_if(
      object->begin(), object->end(), [&](const auto& member) { return member.first == key; });
  return found == object->end() ? nullptr : &found->second;
}

std::string_view Json::kind() const {
  constexpr std::array<std::string_view, std::variant_size_v<decltype(value_)>> kKinds = {
      "null", "a boolean", "an integer", "a number", "a string", "an array", "an object"};
  return kKinds[value_.index()];
}

} // namespace muon::detail
