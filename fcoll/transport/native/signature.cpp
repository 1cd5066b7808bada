#include "signature.h"

#include <cstdio>

#include "served.h"
#include "tensors.h"

namespace fcoll::served {

using namespace fcoll::tensors;

namespace {

std::string dtype_name(at::ScalarType dtype) {
  Type type = type_of(dtype);
  return type == Type::bytes ? c10::toString(dtype) : TYPE_NAMES[size_t(type)];
}

std::string description(const Signature& s) {
  int64_t op = s.words[0], root = s.words[1], dim = s.words[2], tensors = s.words[5];
  std::string text = std::string(s.row) + "(";
  int at = 6;
  if (tensors > 1) text += std::to_string(tensors) + " tensors, the first ";
  if (tensors > 0 && s.size >= at + 2) {
    text += dtype_name(at::ScalarType(s.words[at])) + " [";
    for (int64_t d = 0; d < s.words[at + 1] && at + 2 + d < s.size; d++) {
      int64_t size = s.words[at + 2 + d];
      text += (d ? ", " : "") + (size < 0 ? std::string("own size") : std::to_string(size));
    }
    text += "]";
  }
  if (op >= 0) text += std::string(", ") + OP_NAMES[op];
  if (root >= 0) text += ", root " + std::to_string(root);
  if (dim >= 0) text += ", dim " + std::to_string(dim);
  if (s.words[3] >= 0) text += " and " + std::to_string(s.words[3]);
  if (s.words[4]) text += ", grad=identity";
  // so that calls which differ only in what is not shown (sizes, a permutation) look different
  char mark[16];
  std::snprintf(mark, sizeof mark, " #%04x", unsigned(s.digest >> 48));
  return text + ")" + mark;
}

const bool provided = (describe = &description, true);

}  // namespace

Signature signature_of(c10::string_view row, at::TensorList xs, at::IntArrayRef facts,
                       at::IntArrayRef more) {
  Facts f{facts[0], facts[1], facts[2], facts[3], facts[4], facts[5]};
  Signature s = sign({row.data(), row.size()}, xs, f);
  for (int64_t word : more) s.add(word);
  return s;
}

}  // namespace fcoll::served
