// The loops for all widths of vectors that this CPU has give the same bits: of every type and reduce
// op, for counts around the widths and blocks, at any address, and where the result is a part itself.
#include "kernels.h"

#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

using namespace fcoll;

namespace {

std::mt19937 random_bits(7);

void fill(std::vector<uint8_t>& bytes, Type type) {
  std::normal_distribution<float> normal;
  size_t n = bytes.size();
  auto put = [&](auto value, size_t at) { std::memcpy(&bytes[at], &value, sizeof value); };
  for (size_t i = 0, size = size_of(type); i + size <= n; i += size) {
    float x = normal(random_bits);
    switch (type) {
      case Type::f32: put(x, i); break;
      case Type::f64: put(double(x), i); break;
      case Type::f16: put(_Float16(x), i); break;
      case Type::c64: put(x, i), put(normal(random_bits), i + 4); break;
      case Type::c128: put(double(x), i), put(double(normal(random_bits)), i + 8); break;
      case Type::bf16: {
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        put(uint16_t(bits >> 16), i);
        break;
      }
      default:
        for (size_t j = 0; j < size; j++) bytes[i + j] = random_bits() & (type == Type::boolean ? 1 : 255);
    }
  }
}

bool has_meaning(Type type, Op op) {
  bool bits = op == Op::band || op == Op::bor || op == Op::bxor;
  bool is_complex = type == Type::c64 || type == Type::c128;
  bool is_float = type <= Type::bf16;
  if (is_complex) return op == Op::sum || op == Op::avg || op == Op::product;
  return bits ? !is_float : op == Op::avg ? is_float : true;
}

constexpr size_t COUNTS[] = {0, 1, 7, 8, 15, 17, 31, 65, 1023, 1024, 1025, 5000};

// How many results differ from those of the narrowest vectors, which are any CPU's.
int compare_reductions(int width, int& compared) {
  int wrong = 0;
  for (int t = 0; t < int(Type::bytes); t++)
    for (int o = 0; o <= int(Op::bxor); o++)
      for (int n : {1, 2, 3, 5})
        for (size_t count : COUNTS) {
          Type type = Type(t);
          Op op = Op(o);
          if (!has_meaning(type, op)) continue;
          size_t bytes = count * size_of(type), shift = random_bits() % 3 * size_of(type);
          std::vector<std::vector<uint8_t>> parts(n, std::vector<uint8_t>(bytes + shift));
          const void* at[8];
          for (int r = 0; r < n; r++) fill(parts[r], type), at[r] = parts[r].data() + shift;
          std::vector<uint8_t> want(bytes), got(bytes);
          loops_of(16).reduce(want.data(), at, n, count, type, op);
          loops_of(width).reduce(got.data(), at, n, count, type, op);
          wrong += want != got;
          loops_of(width).reduce(parts[0].data() + shift, at, n, count, type, op);
          wrong += bytes && std::memcmp(want.data(), parts[0].data() + shift, bytes) != 0;
          compared += 2;
        }
  return wrong;
}

int compare_copies(int width) {
  int wrong = 0;
  std::vector<uint8_t> from(4096), to(4096);
  fill(from, Type::u8);
  for (size_t bytes : {0, 1, 63, 64, 65, 127, 128, 1000, 4000})
    for (size_t a : {0, 1, 33, 64})
      for (size_t b : {0, 3, 32}) {
        if (a + bytes > 4096 || b + bytes > 4096) continue;
        std::fill(to.begin(), to.end(), 0);
        loops_of(width).copy_streaming(to.data() + a, from.data() + b, bytes);
        wrong += std::memcmp(to.data() + a, from.data() + b, bytes) != 0;
        for (size_t i = 0; i < to.size(); i++) wrong += (i < a || i >= a + bytes) && to[i];
      }
  return wrong;
}

}  // namespace

int main() {
  int compared = 0, wrong = 0;
  for (int width = 16; width <= vector_bytes(); width *= 2)
    wrong += compare_reductions(width, compared) + compare_copies(width);
  std::printf("up to %d bytes, %d reductions: %s\n", vector_bytes(), compared,
              wrong ? "wrong" : "all right");
  return wrong != 0;
}
