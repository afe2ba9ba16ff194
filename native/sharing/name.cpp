// Names as text: fields with a space between them.
//   vram1 PROCESS IDENTITY DEVICE ADDRESS NUMBER BYTES [PLAIN NAME, hexadecimal]
#include "sharing/name.hpp"

#include <charconv>
#include <vector>

namespace vram {

namespace {

constexpr std::string_view kVersion = "vram1";
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

bool read(std::string_view field, PlainName* out) {
  if (field.size() != 2 * sizeof out->bytes || !hexadecimal(field)) return false;
  for (std::size_t i = 0; i < sizeof out->bytes; ++i)
    out->bytes[i] = static_cast<unsigned char>(16 * digit(field[2 * i]) + digit(field[2 * i + 1]));
  return true;
}

}  // namespace

std::string SharedName::text() const {
  std::string text(kVersion);
  for (const std::string& field : {std::to_string(process), identity, std::to_string(device),
                                   std::to_string(address), std::to_string(number), std::to_string(bytes)})
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
  if (fields.size() < 7 || fields[0] != kVersion) return false;
  out->identity = fields[2];
  if (out->identity.size() != kIdentityLength || !hexadecimal(fields[2])) return false;
  if (!read(fields[1], &out->process) || !read(fields[3], &out->device) || !read(fields[4], &out->address) ||
      !read(fields[5], &out->number) || !read(fields[6], &out->bytes))
    return false;
  if (out->bytes == 0 || out->bytes % kSlotBytes != 0 || out->bytes > kMaxSpaceBytes) return false;
  if (out->number != 0) return fields.size() == 7;
  return fields.size() == 8 && read(fields[7], &out->plain);
}

}  // namespace vram
