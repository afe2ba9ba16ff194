// Names as text: fields with a space between them.
//   vram2 PROCESS IDENTITY ASKING ANSWERING DEVICE ADDRESS NUMBER BYTES [PLAIN NAME, hexadecimal]
#include "sharing/name.hpp"

#include <algorithm>
#include <charconv>
#include <vector>

namespace vram {

namespace {

constexpr std::string_view kVersion = "vram2";
constexpr char kDigits[] = "0123456789abcdef";

std::vector<std::string_view> fields_of(std::string_view text) {
  std::vector<std::string_view> fields;
  for (std::size_t from = 0; from <= text.size();) {
    const std::size_t to = std::min(text.find(' ', from), text.size());
    fields.push_back(text.substr(from, to - from));
    from = to + 1;
  }
  return fields;
}

template <class Number>
bool read(std::string_view field, Number* out) {
  const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), *out);
  return error == std::errc() && end == field.data() + field.size();
}

bool hexadecimal(std::string_view field) {
  return field.find_first_not_of(std::string_view(kDigits)) == std::string_view::npos;
}

int digit(char c) { return c <= '9' ? c - '0' : c - 'a' + 10; }

bool read(std::string_view field, Digits* out) {
  if (field.size() != out->size() || !hexadecimal(field)) return false;
  std::copy(field.begin(), field.end(), out->begin());
  return true;
}

std::string text_of(const Digits& digits) { return {digits.begin(), digits.end()}; }

bool read(std::string_view field, PlainName* out) {
  if (field.size() != 2 * sizeof out->bytes || !hexadecimal(field)) return false;
  for (std::size_t i = 0; i < sizeof out->bytes; ++i)
    out->bytes[i] = static_cast<unsigned char>(16 * digit(field[2 * i]) + digit(field[2 * i + 1]));
  return true;
}

}  // namespace

std::string SharedName::text() const {
  std::string text(kVersion);
  for (const std::string& field :
       {std::to_string(process), text_of(identity), text_of(secrets.asking), text_of(secrets.answering),
        std::to_string(device), std::to_string(address), std::to_string(number), std::to_string(bytes)})
    text += ' ' + field;
  if (number != 0) return text;
  text += ' ';
  for (const unsigned char byte : plain.bytes) {
    text += kDigits[byte / 16];
    text += kDigits[byte % 16];
  }
  return text;
}

bool SharedName::parse(std::string_view text, SharedName* out) {
  if (text.size() > kMostBytes) return false;
  const std::vector<std::string_view> fields = fields_of(text);
  if (fields.size() < 9 || fields[0] != kVersion) return false;
  if (!read(fields[1], &out->process) || !read(fields[2], &out->identity) ||
      !read(fields[3], &out->secrets.asking) || !read(fields[4], &out->secrets.answering) ||
      !read(fields[5], &out->device) || !read(fields[6], &out->address) || !read(fields[7], &out->number) ||
      !read(fields[8], &out->bytes))
    return false;
  if (out->bytes == 0 || out->bytes % kSlotBytes != 0 || out->bytes > kMaxSpaceBytes) return false;
  if (out->number != 0) return fields.size() == 9;
  return fields.size() == 10 && read(fields[9], &out->plain);
}

}  // namespace vram
