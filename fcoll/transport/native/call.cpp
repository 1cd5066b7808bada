#include "call.h"

namespace fcoll {

std::string (*describe)(const Signature&) = nullptr;

Call Call::unpack(uint64_t p, uint64_t count) {
  return {Kind(p & 255), Type(p >> 8 & 255), Op(p >> 16 & 255), uint8_t(p >> 24 & 255), count,
          bool(p >> 32 & 1), bool(p >> 33 & 1)};
}

std::string Call::show() const {
  bool reduces = kind == Kind::all_reduce || kind == Kind::reduce_scatter;
  std::string s = std::string(in_arena ? "compiled " : "") + KIND_NAMES[size_t(kind)] + "(";
  if (kind != Kind::barrier) s += std::to_string(count) + " " + TYPE_NAMES[size_t(type)];
  if (kind == Kind::all_to_all) s += " a row";
  if (reduces) s += std::string(", ") + OP_NAMES[size_t(op)];
  if (kind == Kind::broadcast) s += ", src=" + std::to_string(root);
  return s + ")" + (in_place ? " in place" : "");
}

}  // namespace fcoll
