// muon::detail::Json: what is read and written, and what is refused.

#include <cmath>
#include <limits>
#include <string>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include "state/json.h"

namespace muon::testing {
namespace {

using detail::Json;

Json parse(const std::string& text) {
  return Json::parse(text, {"muon: the options", " (write them again)"});
}

std::string refusal(const std::string& text) {
  try {
    return "read as " + parse(text).dump();
  } catch (const c10::ValueError& error) {
    return error.msg();
  }
}

TEST(Json, reads_every_kind_of_value) {
  const Json json =
      parse(" {\"a\" : [1, -2.5e1, true, false, null, \"x\", {}],\n\"b\":\t{\"c\":[]} } ");
  const Json::Array items = {1, -25.0, true, false, {}, "x", Json::Object{}};
  EXPECT_EQ(
      json, Json(Json::Object{{"a", items}, {"b", Json::Object{{"c", Json(Json::Array{})}}}}));
  ASSERT_NE(json.find("b"), nullptr);
  EXPECT_EQ(json.find("b")->kind(), "an object");
  EXPECT_EQ(json.find("c"), nullptr);
  EXPECT_EQ(json.find("a")->find("x"), nullptr) << "no member of an array";
}

TEST(Json, tells_integers_from_doubles) {
  EXPECT_EQ(parse("9223372036854775807"), Json(std::numeric_limits<std::int64_t>::max()));
  EXPECT_EQ(parse("-9223372036854775808"), Json(std::numeric_limits<std::int64_t>::min()));
  EXPECT_EQ(parse("1.0"), Json(1.0));
  EXPECT_EQ(parse("1e2"), Json(100.0));
  const Json zero = parse("-0");
  ASSERT_NE(zero.get_if<double>(), nullptr);
  EXPECT_TRUE(std::signbit(*zero.get_if<double>()));
}

TEST(Json, writes_doubles_that_read_back_the_same) {
  using Limits = std::numeric_limits<double>;
  for (const double value :
       {0.1, 1.0, -0.0, 1e20, 1e300, 3.4445, 0.02, 1.0 / 3.0, Limits::min(), Limits::denorm_min(),
        Limits::max(), Limits::epsilon(), 123456789012345678.0}) {
    const std::string text = Json(value).dump();
    const Json back = parse(text);
    ASSERT_NE(back.get_if<double>(), nullptr) << text;
    EXPECT_EQ(*back.get_if<double>(), value) << text;
    EXPECT_EQ(std::signbit(*back.get_if<double>()), std::signbit(value)) << text;
  }
  EXPECT_EQ(Json(0.1).dump(), "0.1");
  EXPECT_EQ(Json(1.0).dump(), "1.0");
}

TEST(Json, writes_members_in_their_order_without_space) {
  const Json json(Json::Object{{"z", 1}, {"a", Json::Array{true, Json()}}, {"m", "\"\\\n\x01/é"}});
  const std::string text = json.dump();
  EXPECT_EQ(text, "{\"z\":1,\"a\":[true,null],\"m\":\"\\\"\\\\\\n\\u0001/é\"}");
  EXPECT_EQ(parse(text), json);
}

TEST(Json, decodes_escapes) {
  EXPECT_EQ(
      parse(R"("\"\\\/\b\f\n\r\t\u0041\u00e9\u20ac\ud83d\ude00")"), Json("\"\\/\b\f\n\r\tAé€😀"));
  EXPECT_EQ(parse(R"("a\u0000b")"), Json(std::string("a\0b", 3)));
}

TEST(Json, takes_sixteen_levels_and_refuses_more) {
  const auto nested = [](int depth) {
    return std::string(static_cast<std::size_t>(depth), '[') +
        std::string(static_cast<std::size_t>(depth), ']');
  };
  EXPECT_EQ(parse(nested(16)).dump(), nested(16));
  EXPECT_NE(refusal(nested(17)).find("nested deeper than 16"), std::string::npos);
  EXPECT_NE(refusal(std::string(500'000, '[')).find("nested deeper"), std::string::npos);
  Json json = parse(nested(16));
  json = Json::Array{json};
  EXPECT_THROW(json.dump(), c10::ValueError);
}

TEST(Json, refuses_more_values_than_memory_is_meant_for) {
  std::string text = "[0";
  for (std::size_t i = 0; i < Json::kMaxValues; ++i) {
    text += ",0";
  }
  EXPECT_NE(refusal(text + "]").find("more than 262144 values"), std::string::npos);
}

TEST(Json, says_where_and_what) {
  EXPECT_EQ(
      refusal("{\"a\":1,}"),
      "muon: the options is not valid at byte 7: expected a string in quotes, got \"}\" (write "
      "them again)");
}

struct Bad {
  std::string text;
  std::string mentions;
};

class JsonRefuses : public ::testing::TestWithParam<Bad> {};

TEST_P(JsonRefuses, text_that_is_no_strict_json) {
  const std::string text = refusal(GetParam().text);
  EXPECT_NE(text.find(GetParam().mentions), std::string::npos) << GetParam().text << ": " << text;
}

INSTANTIATE_TEST_SUITE_P(
    texts, JsonRefuses,
    ::testing::Values(
        Bad{"", "expected a number, got the end"}, Bad{"1 2", "expected the end"},
        Bad{"[1,]", "expected a number"}, Bad{"[1", "expected ']'"},
        Bad{"{\"a\" 1}", "expected ':'"}, Bad{"{a:1}", "expected a string"},
        Bad{"'a'", "expected a number"}, Bad{"{\"a\":1,\"b\":2,\"\\u0061\":3}", "has \"a\" twice"},
        Bad{"tru", "got \"tru\""}, Bad{"nullx", "got \"nullx\""}, Bad{"NaN", "expected a number"},
        Bad{"Infinity", "expected a number"}, Bad{"-", "expected a number"},
        Bad{"+1", "expected a number"}, Bad{"01", "leading zeros"}, Bad{"1.", "decimal point"},
        Bad{".5", "expected a number"}, Bad{"1e", "exponent"}, Bad{"1e+", "exponent"},
        Bad{"9223372036854775808", "does not fit 64 bits"}, Bad{"1e999", "does not fit a double"},
        Bad{"\"a", "does not end"}, Bad{"\"a\\", "does not end"},
        Bad{"\"a\n\"", "control character"}, Bad{"\"\\x\"", "escape"},
        Bad{"\"\\u12\"", "four hexadecimal digits"}, Bad{"\"\\u12g4\"", "four hexadecimal digits"},
        Bad{"\"\\ud800\"", "hexadecimal digits"}, Bad{"\"\\ud800\\u0041\"", "surrogate"},
        Bad{"\"\\udc00\"", "surrogate"}, Bad{"\"\x80\"", "byte 1: not UTF-8"},
        Bad{"\"\xc0\xaf\"", "not UTF-8"}, Bad{"\"\xed\xa0\x80\"", "not UTF-8"},
        Bad{"\"\xf4\x90\x80\x80\"", "not UTF-8"}, Bad{"\"\xe2\x82", "not UTF-8"},
        Bad{"// x\n1", "expected a number"},
        Bad{"\xef\xbb\xbf"
            "1",
            "expected a number"}));

TEST(Json, refuses_to_write_what_it_could_not_read) {
  EXPECT_THROW(Json(std::numeric_limits<double>::infinity()).dump(), c10::ValueError);
  EXPECT_THROW(Json(std::nan("")).dump(), c10::ValueError);
  EXPECT_THROW(Json("\xff").dump(), c10::ValueError);
  EXPECT_THROW(Json(Json::Object{{"\xff", 1}}).dump(), c10::ValueError);
}

} // namespace
} // namespace muon::testing
