// Lists of tensors as one message for each dtype.
#include <algorithm>
#include <cstring>
#include <map>

#include "served.h"
#include "signature.h"
#include "tensors.h"

namespace fcoll::served {

using namespace fcoll::tensors;

namespace {

// The positions of the tensors of each dtype, in the order of first appearance.
std::vector<std::vector<size_t>> by_dtype(const std::vector<Tensor>& xs) {
  std::vector<std::vector<size_t>> same;
  std::map<at::ScalarType, size_t> place;
  for (size_t i = 0; i < xs.size(); i++) {
    auto [at, is_new] = place.emplace(xs[i].scalar_type(), same.size());
    if (is_new) same.emplace_back();
    same[at->second].push_back(i);
  }
  return same;
}

// Many tensors as one: `rows` rows, in each of which they lie side by side.
struct Packed {
  std::vector<Tensor> parts;  // contiguous
  size_t rows;
  Tensor flat;

  Packed(std::vector<Tensor> tensors, size_t rows) : parts(std::move(tensors)), rows(rows) {
    int64_t numel = 0;
    for (auto& x : parts) numel += x.numel();
    flat = empty(parts[0], {numel});
  }
  // For every row of every part: its place in the flat tensor, the part, its place there, bytes.
  template <class Move>
  void each(Move move) const {
    auto* at = static_cast<uint8_t*>(flat.mutable_data_ptr());
    for (size_t row = 0; row < rows; row++)
      for (const auto& x : parts) {
        size_t bytes = x.nbytes() / rows;
        if (bytes) move(at, x, row * bytes, bytes);
        at += bytes;
      }
  }
  void pack() const {
    each([](uint8_t* flat, const Tensor& x, size_t at, size_t bytes) {
      std::memcpy(flat, static_cast<const uint8_t*>(x.const_data_ptr()) + at, bytes);
    });
  }
  void unpack() const {
    each([](uint8_t* flat, const Tensor& x, size_t at, size_t bytes) {
      std::memcpy(static_cast<uint8_t*>(x.mutable_data_ptr()) + at, flat, bytes);
    });
  }
};

// The results, dtype after dtype: the inputs are packed in `in_rows` rows, `run` fills `out_rows`,
// which are unpacked into the results. Dim 0 grows or shrinks as the number of rows does.
template <class Run>
std::vector<Tensor> coalesced(const std::vector<Tensor>& xs, size_t in_rows, size_t out_rows,
                              Run run) {
  std::vector<Tensor> outs(xs.size());
  for (const auto& same : by_dtype(xs)) {
    std::vector<Tensor> ins, made;
    for (size_t i : same) {
      ins.push_back(xs[i].contiguous());
      at::DimVector shape(xs[i].sizes());
      if (in_rows != out_rows) {
        if (shape.empty()) shape.push_back(1);
        shape[0] = shape[0] * int64_t(out_rows) / int64_t(in_rows);
      }
      outs[i] = empty(xs[i], shape);
      made.push_back(outs[i]);
    }
    Packed in(std::move(ins), in_rows), out(std::move(made), out_rows);
    in.pack();
    run(in.flat, out.flat);
    out.unpack();
  }
  return outs;
}

// All along dim 0; the dims follow the tensors, as the long way has them.
Signature sign_with_dims(std::string_view row, const std::vector<Tensor>& xs, const Facts& facts) {
  Signature s = sign(row, xs, facts);
  for (size_t i = 0; i < xs.size(); i++) s.add(0);
  return s;
}

bool all_reduce_here(const std::vector<Tensor>& xs, Op op) {
  return std::all_of(xs.begin(), xs.end(), [&](const Tensor& x) { return reduces(x, op); });
}

}  // namespace

std::vector<Tensor> all_reduce_coalesced(const GroupPtr& g, const std::vector<Tensor>& xs, Op op,
                                         bool grad) {
  if (!all_reduce_here(xs, op)) return {};
  Signature s = sign("all_reduce_coalesced", xs, {.op = int64_t(op), .grad = grad});
  return coalesced(xs, 1, 1, [&](const Tensor& in, const Tensor& out) {
    guarded([&] {
      g->run(Call::all_reduce(in.numel(), type_of(in), op).signed_by(s), in.const_data_ptr(),
             out.mutable_data_ptr());
    });
  });
}

std::vector<Tensor> all_gather_coalesced(const GroupPtr& g, const std::vector<Tensor>& xs) {
  Signature s = sign_with_dims("all_gather_into_tensor_coalesced", xs, {});
  return coalesced(xs, 1, g->size(), [&](const Tensor& in, const Tensor& out) {
    guarded([&] {
      g->run(Call::all_gather(in.nbytes()).signed_by(s), in.const_data_ptr(), out.mutable_data_ptr());
    });
  });
}

std::vector<Tensor> reduce_scatter_coalesced(const GroupPtr& g, const std::vector<Tensor>& xs,
                                             Op op) {
  bool even = std::all_of(xs.begin(), xs.end(), [&](const Tensor& x) {
    return x.dim() && x.size(0) % g->size() == 0;
  });
  if (!even || !all_reduce_here(xs, op)) return {};
  Signature s = sign_with_dims("reduce_scatter_tensor_coalesced", xs, {.op = int64_t(op)});
  return coalesced(xs, g->size(), 1, [&](const Tensor& in, const Tensor& out) {
    guarded([&] {
      g->run(Call::reduce_scatter(out.numel(), type_of(in), op).signed_by(s), in.const_data_ptr(),
             out.mutable_data_ptr());
    });
  });
}

}  // namespace fcoll::served
