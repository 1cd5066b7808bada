// The inner loops, once for each width of vectors: kernels.cpp includes this file several times, each
// time in a namespace and with instructions of its own. FCOLL_VECTOR_BYTES is 16 (SSE2, which all
// x86-64 have), 32 (AVX2 and F16C) or 64 (AVX-512). None has FMA: a product has the same bits with all.

struct Sum { template <class T> T operator()(T a, T b) const { return a + b; } };
struct Product { template <class T> T operator()(T a, T b) const { return a * b; } };
// A NaN on either side is the result, as in torch.
struct Min { template <class T> T operator()(T a, T b) const { return (a < b || a != a) ? a : b; } };
struct Max { template <class T> T operator()(T a, T b) const { return (a > b || a != a) ? a : b; } };
struct And { template <class T> T operator()(T a, T b) const { return a & b; } };
struct Or { template <class T> T operator()(T a, T b) const { return a | b; } };
struct Xor { template <class T> T operator()(T a, T b) const { return a ^ b; } };

// The parts of one block of 4 KiB stay in L1 while they are added up, whatever n is.
constexpr size_t BLOCK = 1024;  // of f32

// What is left to do to the whole: nothing, or the division of a mean.
struct AsIs { template <class T> T operator()(T a) const { return a; } };
struct Over { int n; template <class T> T operator()(T a) const { return a / T(n); } };

template <class T, class F, class G>
void reduce_same(T* out, const T* const* p, int n, size_t count, F f, G last) {
  const T *a = p[0], *b = n > 1 ? p[1] : nullptr;
  if (n == 1) {
    if (count) std::memmove(out, a, count * sizeof(T));  // of nothing the pointers may be null
  } else if (n == 2) {
    // Unrolled: a loop of 6 instructions took 144 ns instead of 78 for 8 KiB where it happened to lie
    // across a line of the cache of instructions (Zen 4).
#pragma GCC ivdep
#pragma GCC unroll 4
    for (size_t i = 0; i < count; i++) out[i] = last(f(a[i], b[i]));
  } else {
    constexpr size_t block = BLOCK * sizeof(float) / sizeof(T);
    T acc[block];  // out may be one of the parts
    for (size_t at = 0; at < count; at += block) {
      size_t m = std::min(block, count - at);
      for (size_t i = 0; i < m; i++) acc[i] = f(a[at + i], b[at + i]);
      for (int r = 2; r < n; r++) {
        const T* c = p[r] + at;
#pragma GCC unroll 4
        for (size_t i = 0; i < m; i++) acc[i] = f(acc[i], c[i]);
      }
      for (size_t i = 0; i < m; i++) out[at + i] = last(acc[i]);
    }
  }
}

struct BF16 {
  static void load(float* to, const uint16_t* from, size_t m) {
    for (size_t i = 0; i < m; i++) {
      uint32_t bits = uint32_t(from[i]) << 16;
      std::memcpy(to + i, &bits, 4);
    }
  }
  static void store(uint16_t* to, const float* from, size_t m) {
    for (size_t i = 0; i < m; i++) {
      uint32_t bits;
      std::memcpy(&bits, from + i, 4);
      uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
      to[i] = from[i] != from[i] ? 0x7fc0 : rounded;
    }
  }
};

struct F16 {
  static void load(float* to, const uint16_t* from, size_t m) {
    size_t i = 0;
#if FCOLL_VECTOR_BYTES == 64
    for (; i + 16 <= m; i += 16)
      _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(from + i))));
#endif
#if FCOLL_VECTOR_BYTES >= 32
    for (; i + 8 <= m; i += 8)
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + i))));
#endif
    for (; i < m; i++) {
      _Float16 h;
      std::memcpy(&h, from + i, 2);
      to[i] = float(h);
    }
  }
  static void store(uint16_t* to, const float* from, size_t m) {
    size_t i = 0;
#if FCOLL_VECTOR_BYTES == 64
    for (; i + 16 <= m; i += 16)
      _mm256_storeu_si256((__m256i*)(to + i), _mm512_cvtps_ph(_mm512_loadu_ps(from + i), 0));
#endif
#if FCOLL_VECTOR_BYTES >= 32
    for (; i + 8 <= m; i += 8)
      _mm_storeu_si128((__m128i*)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
#endif
    for (; i < m; i++) {
      _Float16 h = _Float16(from[i]);
      std::memcpy(to + i, &h, 2);
    }
  }
};

// Narrow floats: widened, added up in f32, rounded once.
template <class Half, class F, class G>
void reduce_half(uint16_t* out, const uint16_t* const* p, int n, size_t count, F f, G last) {
  float acc[BLOCK], next[BLOCK];
  for (size_t at = 0; at < count; at += BLOCK) {
    size_t m = std::min(BLOCK, count - at);
    Half::load(acc, p[0] + at, m);
    for (int r = 1; r < n; r++) {
      Half::load(next, p[r] + at, m);
      for (size_t i = 0; i < m; i++) acc[i] = f(acc[i], next[i]);
    }
    for (size_t i = 0; i < m; i++) acc[i] = last(acc[i]);
    Half::store(out + at, acc, m);
  }
}

template <class T, class F, class G = AsIs>
void reduce_as(void* out, const void* const* parts, int n, size_t count, F f, G last = {}) {
  reduce_same(static_cast<T*>(out), reinterpret_cast<const T* const*>(parts), n, count, f, last);
}

template <class F, class G = AsIs>
void reduce_floats(void* out, const void* const* parts, int n, size_t count, Type type, F f,
                   G last = {}) {
  type == Type::f64 ? reduce_as<double>(out, parts, n, count, f, last)
                    : reduce_as<float>(out, parts, n, count, f, last);
}

template <class Half>
void reduce_halves_as(void* out, const void* const* parts, int n, size_t count, Op op) {
  auto p = reinterpret_cast<const uint16_t* const*>(parts);
  auto to = static_cast<uint16_t*>(out);
  switch (op) {
    case Op::sum: return reduce_half<Half>(to, p, n, count, Sum(), AsIs());
    case Op::avg: return reduce_half<Half>(to, p, n, count, Sum(), Over{n});
    case Op::product: return reduce_half<Half>(to, p, n, count, Product(), AsIs());
    case Op::min: return reduce_half<Half>(to, p, n, count, Min(), AsIs());
    case Op::max: return reduce_half<Half>(to, p, n, count, Max(), AsIs());
    default: throw std::logic_error("no such reduction");
  }
}

void reduce_halves(void* out, const void* const* parts, int n, size_t count, Type type, Op op) {
  type == Type::f16 ? reduce_halves_as<F16>(out, parts, n, count, op)
                    : reduce_halves_as<BF16>(out, parts, n, count, op);
}

template <class F>
void reduce_ints(void* out, const void* const* parts, int n, size_t count, Type type, F f) {
  switch (type) {
    case Type::i8: return reduce_as<int8_t>(out, parts, n, count, f);
    case Type::i16: return reduce_as<int16_t>(out, parts, n, count, f);
    case Type::i32: return reduce_as<int32_t>(out, parts, n, count, f);
    case Type::i64: return reduce_as<int64_t>(out, parts, n, count, f);
    case Type::u8: return reduce_as<uint8_t>(out, parts, n, count, f);
    default: throw std::logic_error("no such reduction");
  }
}

// Those that AVX2 has no instruction for; true if this was one.
bool reduce_int64(void* out, const void* const* parts, int n, size_t count, Op op) {
  switch (op) {
    case Op::product: reduce_as<int64_t>(out, parts, n, count, Product()); return true;
    case Op::min: reduce_as<int64_t>(out, parts, n, count, Min()); return true;
    case Op::max: reduce_as<int64_t>(out, parts, n, count, Max()); return true;
    default: return false;
  }
}

// Bits have no type: as bytes.
template <class F>
void reduce_bits(void* out, const void* const* parts, int n, size_t count, Type type, F f) {
  reduce_as<uint8_t>(out, parts, n, count * size_of(type), f);
}

template <class F>
void reduce_numbers(void* out, const void* const* parts, int n, size_t count, Type type, F f) {
  bool is_float = type == Type::f32 || type == Type::f64;
  is_float ? reduce_floats(out, parts, n, count, type, f)
           : reduce_ints(out, parts, n, count, type, f);
}

void stream(void* to, const void* from, size_t bytes) {
  auto t = static_cast<uint8_t*>(to);
  auto f = static_cast<const uint8_t*>(from);
  size_t head = std::min(bytes, -reinterpret_cast<uintptr_t>(t) % 64), at = head;
  std::memcpy(t, f, head);
  for (; at + 64 <= bytes; at += 64) {
#if FCOLL_VECTOR_BYTES == 64
    _mm512_stream_si512(reinterpret_cast<__m512i*>(t + at), _mm512_loadu_si512(f + at));
#elif FCOLL_VECTOR_BYTES == 32
    auto low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(f + at));
    auto high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(f + at + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(t + at), low);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(t + at + 32), high);
#else
    for (int i = 0; i < 64; i += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(t + at + i),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(f + at + i)));
#endif
  }
  std::memcpy(t + at, f + at, bytes - at);
}

void reduce_all(void* out, const void* const* parts, int n, size_t count, Type type, Op op) {
  if (type == Type::boolean) {  // truth values as bytes of 0 and 1
    op = op == Op::sum || op == Op::bor ? Op::max : op == Op::product || op == Op::band ? Op::min : op;
    type = Type::u8;
  }
  if (type == Type::c64 || type == Type::c128) {
    bool wide = type == Type::c128;
    if (op == Op::sum || op == Op::avg)
      return reduce_all(out, parts, n, count * 2, wide ? Type::f64 : Type::f32, op);
    return wide ? reduce_as<std::complex<double>>(out, parts, n, count, Product())
                : reduce_as<std::complex<float>>(out, parts, n, count, Product());
  }
  if (is_half(type)) return reduce_halves(out, parts, n, count, type, op);
  switch (op) {
    case Op::sum: return reduce_numbers(out, parts, n, count, type, Sum());
    case Op::avg: return reduce_floats(out, parts, n, count, type, Sum(), Over{n});
    case Op::product: return reduce_numbers(out, parts, n, count, type, Product());
    case Op::min: return reduce_numbers(out, parts, n, count, type, Min());
    case Op::max: return reduce_numbers(out, parts, n, count, type, Max());
    case Op::band: return reduce_bits(out, parts, n, count, type, And());
    case Op::bor: return reduce_bits(out, parts, n, count, type, Or());
    case Op::bxor: return reduce_bits(out, parts, n, count, type, Xor());
  }
}
