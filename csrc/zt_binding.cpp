// Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
//
// The C interface as kernels of torch's operators (schemas: zero_topo/quant/operators.py): the only file that knows torch.
// Compiled with the CPU kernels it splits the work among torch's threads; with ZT_FOR_GPU it launches on torch's current
// stream, and needs no CUDA header. What the kernels refuse becomes a RuntimeError.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <pybind11/pybind11.h>
#include <torch/library.h>
#include <torch/version.h>

#include <algorithm>
#include <atomic>
#include <list>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#include "zt_kernels.h"

namespace {

using Tensors = at::TensorList;
using Numbers = at::IntArrayRef;

// Values per task: small enough to balance the threads, large enough to hide the cost of starting a task. Tests split
// little work among many tasks.
int64_t grain = 1 << 15;

template <class T> int32_t count_of(T size) { return static_cast<int32_t>(size); }

#ifdef ZT_FOR_GPU
const char *runtime_text(int status) { return zt_gpu_runtime_text(status); }
#else
const char *runtime_text(int) { return ""; }
#endif

void check(int status) {
    if (status == ZT_OK) return;
    const std::string more = runtime_text(status);
    TORCH_CHECK(false, "zero_topo kernels: ", zt_error_text(status), more.empty() ? "" : ": ", more);
}

// (bits, block size, dtype or levels)
zt_wire_spec spec_of(Numbers spec) {
    TORCH_CHECK(spec.size() == 3, "a specification is (bits, block size, dtype or levels)");
    const zt_wire_spec made = {count_of(spec[0]), count_of(spec[1]), count_of(spec[2])};
    check(zt_wire_valid(made) ? ZT_OK : ZT_BAD_SPEC);
    return made;
}

int32_t dtype_of(const at::Tensor &x) {
    const auto type = x.scalar_type();
    return type == at::kFloat ? ZT_FP32 : type == at::kHalf ? ZT_FP16 : type == at::kBFloat16 ? ZT_BF16 : -1;
}

// shapes: rows, columns, present columns, row stride and member stride of each.
std::vector<zt_piece> pieces_of(Tensors flats, Numbers shapes) {
    TORCH_CHECK(shapes.size() == 5 * flats.size(), "five numbers say the shape of a piece");
    std::vector<zt_piece> pieces;
    pieces.reserve(flats.size());
    for (size_t i = 0; i < flats.size(); ++i) {
        const int64_t *shape = &shapes[5 * i];
        pieces.push_back({flats[i].data_ptr(), shape[0], shape[1], shape[2], shape[3], shape[4], flats[i].numel(),
                          dtype_of(flats[i])});
    }
    return pieces;
}

// How much work arguments make, by a product of theirs; none if they are nonsense, which the kernels then refuse.
int64_t work_of(int64_t a, int64_t b) {
    int64_t product = 0;
    return a < 0 || b < 0 || __builtin_mul_overflow(a, b, &product) || product >> 56 ? 0 : product;
}

int64_t numel_of(const std::vector<zt_piece> &pieces) {
    return std::accumulate(pieces.begin(), pieces.end(), int64_t{0},
                           [](int64_t sum, const zt_piece &p) { return sum + work_of(p.rows, p.columns); });
}

// table: [sources, outer, inner, bytes]; a source and a member are left out, -1 for none.
zt_messages messages_of(const at::Tensor &table, int64_t without_source, int64_t without_member) {
    TORCH_CHECK(table.dim() == 4 && table.scalar_type() == at::kByte, "messages are a table of four dimensions, of bytes");
    const auto sizes = table.sizes(), strides = table.strides();
    return {table.data_ptr<uint8_t>(), sizes[3], count_of(sizes[0]), count_of(sizes[1] * sizes[2]), count_of(sizes[2]),
            count_of(without_source), count_of(without_member), strides[0], strides[1], strides[2]};
}

#ifdef ZT_FOR_GPU

// torch's current stream on the device of a tensor; none for the emulation's tensors, which are on a CPU. Python has the
// handle without a header of CUDA or ROCm.
void *stream_of(const at::Tensor &x) {
    if (x.is_cpu()) return nullptr;
    const pybind11::gil_scoped_acquire acquired;
    const auto current = pybind11::module_::import("torch._C").attr("_cuda_getCurrentRawStream");
    return reinterpret_cast<void *>(current(static_cast<int>(x.get_device())).cast<uintptr_t>());
}

// Makes the device of a tensor the current one while it lives: a thread in which nobody called set_device launches on
// device 0 else. Its stream is torch's current one there.
struct OnDevice {
    explicit OnDevice(const at::Tensor &x) : guard(x.device()), stream(stream_of(x)) {}
    const c10::DeviceGuard guard;
    void *const stream;
};

// A table in device memory, kept until the launch that reads it is queued; or none.
struct Uploaded {
    at::Tensor data;
    operator const void *() const { return data.defined() ? data.data_ptr() : nullptr; }
};

// Tables of pieces, uploaded when they are first asked for: once for each layout and stream, so that the stream's order
// holds between what reads a table and what gets its memory later. The last kMost are kept.
class Tables {
  public:
    Uploaded of(Tensors flats, const std::vector<zt_piece> &pieces, void *stream) {
        const int32_t count = count_of(pieces.size());
        std::string content(zt_gpu_table_bytes(count), 0);
        if (content.empty()) return {};  // they travel with the launch
        check(zt_gpu_table(pieces.data(), count, content.data()));
        const std::lock_guard<std::mutex> guard(lock_);
        const auto found = std::find_if(kept_.begin(), kept_.end(), [&](const Table &table) {
            return table.stream == stream && table.content == content;
        });
        if (found != kept_.end()) {
            kept_.splice(kept_.begin(), kept_, found);
        } else {
            kept_.push_front({stream, content, upload(content, flats[0])});
            if (kept_.size() > kMost) kept_.pop_back();
        }
        return kept_.front().table;
    }
    size_t size() const { return kept_.size(); }

  private:
    struct Table {
        void *stream;
        std::string content;
        Uploaded table;
    };

    static Uploaded upload(const std::string &content, const at::Tensor &like) {
        const auto options = like.options().dtype(at::kByte);
        auto host = at::empty({static_cast<int64_t>(content.size())},
                              options.device(at::kCPU).pinned_memory(like.is_cuda()));
        std::copy(content.begin(), content.end(), host.data_ptr<uint8_t>());
        return {host.to(like.device(), true)};
    }

    static constexpr size_t kMost = 256;
    std::list<Table> kept_;  // the last one used first
    std::mutex lock_;
};

Tables &tables() {
    static auto *kept = new Tables;  // never freed: CUDA may end before the process does
    return *kept;
}

#define ZT_PIECES pieces.data(), count_of(pieces.size()), tables().of(flats, pieces, on_device.stream)
#define ZT_STREAM(x) const OnDevice on_device(x)
#define ZT_ON(function, blocks, size, ...) check(zt_gpu_##function(__VA_ARGS__, on_device.stream))

#else

#define ZT_PIECES pieces.data(), count_of(pieces.size())
#define ZT_STREAM(x)

// Calls f(range) over [0, total) in tasks; any split gives the same bits.
template <class F> void split(int64_t total, int64_t each, const F &f) {
    if (total <= 0) return check(f(zt_range{0, 0}));  // only checks the arguments
    at::parallel_for(0, total, std::max<int64_t>(1, each),
                     [&](int64_t begin, int64_t end) { check(f(zt_range{begin, end})); });
}

#define ZT_ON(function, blocks, size, ...)                                                                             \
    split(blocks, grain / std::max<int64_t>(1, size),                                                                  \
          [&](zt_range range) { return zt_cpu_##function(__VA_ARGS__, range, ZT_BEST); })

#endif

// Wire blocks of all members.
int64_t blocks_of(const zt_wire_spec &spec, int64_t numel, const zt_messages &messages) {
    return work_of(zt_wire_blocks(spec, work_of(numel, 1)), messages.members);
}

void quantize(Tensors flats, Numbers shapes, Numbers format, const at::Tensor &out, int64_t without_member) {
    const auto spec = spec_of(format);
    const auto pieces = pieces_of(flats, shapes);
    const auto messages = messages_of(out, -1, without_member);
    ZT_STREAM(out);
    ZT_ON(quantize, blocks_of(spec, numel_of(pieces), messages), spec.block_size, spec, ZT_PIECES, messages);
}

void dequantize_reduce(const at::Tensor &table, int64_t without_source, int64_t without_member, Numbers format,
                       Tensors flats, Numbers shapes, double factor, bool accumulate) {
    const auto spec = spec_of(format);
    const auto pieces = pieces_of(flats, shapes);
    const auto messages = messages_of(table, without_source, without_member);
    const zt_reduce reduce = {static_cast<float>(factor), accumulate ? 1 : 0};
    ZT_STREAM(table);
    ZT_ON(dequantize_reduce, blocks_of(spec, numel_of(pieces), messages), spec.block_size, spec, messages, ZT_PIECES,
          reduce);
}

void requantize(const at::Tensor &table, int64_t without_source, Numbers source, const at::Tensor &out,
                int64_t without_member, Numbers format, int64_t numel, double factor) {
    const auto from = spec_of(source), to = spec_of(format);
    const auto messages = messages_of(table, without_source, -1), made = messages_of(out, -1, without_member);
    const zt_reduce reduce = {static_cast<float>(factor), 0};
    ZT_STREAM(out);
    ZT_ON(requantize, blocks_of(to, numel, made), to.block_size, from, messages, to, made, numel, reduce);
}

// part: block size, begin, end, rows and members.
zt_codes codes_of(const at::Tensor &stored, const at::Tensor &params, const at::Tensor &param_of, Numbers part) {
    TORCH_CHECK(part.size() == 5 && params.dim() == 2, "a block size and four numbers say the part of the codes");
    return {stored.data_ptr<uint8_t>(), stored.numel(), params.data_ptr<int64_t>(), param_of.data_ptr<int32_t>(),
            param_of.numel(), count_of(params.size(0)), count_of(part[0])};
}

zt_part part_of(Numbers part) { return {part[1], part[2], part[3], part[4]}; }

int64_t blocks_of(const zt_part &part) {
    return part.begin < 0 || part.end < 0 ? 0 : work_of(part.rows, part.end - part.begin);
}

// own: the column of all parameters that its first one is, and whose rows.
zt_masters masters_of(const at::Tensor &table, Numbers own) {
    TORCH_CHECK(table.dim() == 2 && own.size() == 2, "masters are a table of two dimensions, and two numbers");
    return {table.data_ptr<float>(), table.stride(0), table.size(1), own[0], own[1]};
}

void codes_assess(const at::Tensor &table, Numbers own, const at::Tensor &stored, const at::Tensor &params,
                  const at::Tensor &param_of, Numbers numbers, const at::Tensor &scales, const at::Tensor &counts,
                  const at::Tensor &steps, const at::Tensor &sizes) {
    const auto codes = codes_of(stored, params, param_of, numbers);
    const auto part = part_of(numbers);
    ZT_STREAM(stored);
    ZT_ON(codes_assess, blocks_of(part), codes.block, masters_of(table, own), codes, part,
          scales.data_ptr<float>(), counts.data_ptr<uint8_t>(), steps.data_ptr<uint8_t>(), sizes.data_ptr<int64_t>());
}

void codes_emit(const at::Tensor &table, Numbers own, const at::Tensor &stored, const at::Tensor &params,
                const at::Tensor &param_of, Numbers numbers, const at::Tensor &scales, const at::Tensor &counts,
                const at::Tensor &steps, const at::Tensor &ends, const at::Tensor &message) {
    const auto codes = codes_of(stored, params, param_of, numbers);
    const auto part = part_of(numbers);
    TORCH_CHECK(ends.numel() / 2 >= blocks_of(part), "two ends for each block of the part");
    const zt_change made = {scales.data_ptr<float>(), counts.data_ptr<uint8_t>(), steps.data_ptr<uint8_t>(),
                            ends.data_ptr<int64_t>()};
    ZT_STREAM(stored);
    ZT_ON(codes_emit, blocks_of(part), codes.block, masters_of(table, own), codes, part, made,
          message.data_ptr<uint8_t>(), message.numel());
}

void codes_apply(const at::Tensor &table, int64_t without_member, const at::Tensor &stored, const at::Tensor &params,
                 const at::Tensor &param_of, Numbers numbers) {
    const auto codes = codes_of(stored, params, param_of, numbers);
    const auto part = part_of(numbers);
    ZT_STREAM(stored);
    ZT_ON(codes_apply, work_of(blocks_of(part), part.members), codes.block, messages_of(table, -1, without_member), codes,
          part);
}

// settings: as in aged_adamw in quant/ops.py.
void aged_adamw(const at::Tensor &p, const at::Tensor &g, const at::Tensor &mean, const at::Tensor &square,
                const at::Tensor &age, const at::Tensor &table, at::ArrayRef<double> settings) {
    TORCH_CHECK(settings.size() == 6 && table.numel() == 2 * ZT_AGES, "six settings, and two rows of factors");
    const auto set = [&](size_t i) { return static_cast<float>(settings[i]); };
    const zt_aged aged = {p.data_ptr<float>(), g.data_ptr<float>(), mean.data_ptr<float>(), square.data_ptr<float>(),
                          age.data_ptr<uint8_t>(), p.numel(), table.data_ptr<float>(), set(0), set(1), set(2), set(3),
                          set(4), set(5)};
#ifdef ZT_FOR_GPU
    check(zt_gpu_aged_adamw(aged, OnDevice(p).stream));
#else
    split(aged.n, grain, [&](zt_range elements) { return zt_cpu_aged_adamw(aged, elements); });
#endif
}

#ifdef ZT_FOR_GPU

void mask_pack(const at::Tensor &mask, const at::Tensor &bits) {
    check(zt_gpu_mask_pack(static_cast<uint8_t *>(mask.data_ptr()), mask.numel(), bits.data_ptr<uint8_t>(),
                           OnDevice(bits).stream));
}

void mask_unpack(const at::Tensor &bits, const at::Tensor &mask) {
    check(zt_gpu_mask_unpack(bits.data_ptr<uint8_t>(), mask.numel(), static_cast<uint8_t *>(mask.data_ptr()),
                             OnDevice(bits).stream));
}

at::Tensor chunk_counts(const at::Tensor &x, double threshold) {
    auto partial = at::empty({zt_gpu_partials(x.numel())}, x.options().dtype(at::kLong));
    check(zt_gpu_count_above(x.data_ptr(), dtype_of(x), x.numel(), static_cast<float>(threshold),
                             partial.data_ptr<int64_t>(), OnDevice(x).stream));
    return partial;
}

at::Tensor count_above(const at::Tensor &x, double threshold) {
    return chunk_counts(x, threshold).sum().view({1});
}

at::Tensor compact_above(const at::Tensor &x, double threshold, const at::Tensor &indices, const at::Tensor &values) {
    const auto counts = chunk_counts(x, threshold);
    const auto ends = counts.cumsum(0);
    const auto offsets = ends.sub(counts).contiguous();
    check(zt_gpu_compact_above(x.data_ptr(), dtype_of(x), x.numel(), static_cast<float>(threshold),
                               offsets.data_ptr<int64_t>(), indices.numel(), indices.data_ptr<int64_t>(),
                               values.data_ptr(), OnDevice(x).stream));
    return ends.slice(0, -1).clone();
}

void sketch_insert(const at::Tensor &x, int64_t seed, const at::Tensor &sketch) {
    check(zt_gpu_sketch_insert(x.data_ptr<float>(), x.size(0), x.size(1), seed, sketch.size(1),
                               sketch.data_ptr<float>(), OnDevice(x).stream));
}

at::Tensor sketch_peel(const at::Tensor &sketch, const at::Tensor &bits, int64_t seed, const at::Tensor &out) {
    auto left = at::empty({1}, out.options().dtype(at::kLong)).zero_();
    auto work = at::empty({zt_gpu_sketch_work(out.numel(), sketch.size(0))}, out.options().dtype(at::kByte));
    check(zt_gpu_sketch_peel(sketch.data_ptr<float>(), bits.data_ptr<uint8_t>(), out.numel(), seed, sketch.size(0),
                             out.data_ptr<float>(), work.data_ptr(), left.data_ptr<int64_t>(), OnDevice(out).stream));
    return left;
}

#else

void mask_pack(const at::Tensor &mask, const at::Tensor &bits) {
    const auto *from = static_cast<const uint8_t *>(mask.data_ptr());
    const int64_t n = mask.numel();
    split((n + 7) / 8, grain, [&](zt_range r) {  // in bytes, so that ranges begin at multiples of 8 elements
        return zt_cpu_mask_pack(from, n, bits.data_ptr<uint8_t>(), {8 * r.begin, std::min(8 * r.end, n)});
    });
}

void mask_unpack(const at::Tensor &bits, const at::Tensor &mask) {
    auto *to = static_cast<uint8_t *>(mask.data_ptr());
    const int64_t n = mask.numel();
    split((n + 7) / 8, grain, [&](zt_range r) {
        return zt_cpu_mask_unpack(bits.data_ptr<uint8_t>(), n, to, {8 * r.begin, std::min(8 * r.end, n)});
    });
}

// How many elements each chunk of grain holds that are above the threshold.
std::vector<int64_t> chunk_counts(const at::Tensor &x, float threshold) {
    const int64_t n = x.numel();
    std::vector<int64_t> counts((n + grain - 1) / grain);
    split(static_cast<int64_t>(counts.size()), 1, [&](zt_range chunks) {
        int status = ZT_OK;
        for (int64_t c = chunks.begin; c < chunks.end && status == ZT_OK; ++c)
            status = zt_cpu_count_above(x.data_ptr(), dtype_of(x), threshold,
                                        {c * grain, std::min((c + 1) * grain, n)}, &counts[c], ZT_BEST);
        return status;
    });
    return counts;
}

at::Tensor number(int64_t value) { return at::empty({1}, at::kLong).fill_(value); }

at::Tensor count_above(const at::Tensor &x, double threshold) {
    const auto counts = chunk_counts(x, static_cast<float>(threshold));
    return number(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
}

at::Tensor compact_above(const at::Tensor &x, double threshold, const at::Tensor &indices, const at::Tensor &values) {
    const int64_t n = x.numel(), room = indices.numel();
    const auto bound = static_cast<float>(threshold);
    auto compact = [&](zt_range range, int64_t offset, int64_t *found) {
        const int64_t first = std::min(offset, room);
        auto *chosen = static_cast<char *>(values.data_ptr()) + first * values.element_size();
        return zt_cpu_compact_above(x.data_ptr(), dtype_of(x), bound, range, room - first,
                                    indices.data_ptr<int64_t>() + first, chosen, found, ZT_BEST);
    };
    int64_t total = 0;
    if (at::get_num_threads() == 1) {
        check(compact({0, n}, 0, &total));
        return number(total);
    }
    const auto counts = chunk_counts(x, bound);
    std::vector<int64_t> offsets(counts.size());
    std::exclusive_scan(counts.begin(), counts.end(), offsets.begin(), int64_t{0});
    split(static_cast<int64_t>(counts.size()), 1, [&](zt_range chunks) {
        int status = ZT_OK;
        int64_t found = 0;
        for (int64_t c = chunks.begin; c < chunks.end && status == ZT_OK; ++c)
            status = compact({c * grain, std::min((c + 1) * grain, n)}, offsets[c], &found);
        return status;
    });
    return number(std::accumulate(counts.begin(), counts.end(), total));
}

void row_largest(const at::Tensor &x, const at::Tensor &indices) {
    split(x.size(0), grain / x.size(1), [&](zt_range rows) {
        return zt_cpu_row_largest(x.data_ptr<float>(), x.size(1), indices.size(1), indices.data_ptr<int64_t>(), rows);
    });
}

// (elements of a block, those chosen, low bits of a position, dtype of a scale)
zt_ternary ternary_of(Numbers form) {
    TORCH_CHECK(form.size() == 4, "the form of a packet is four numbers");
    return {count_of(form[0]), count_of(form[1]), count_of(form[2]), count_of(form[3])};
}

at::Tensor ternary_encode(const at::Tensor &x, const at::Tensor &indices, Numbers form, const at::Tensor &packets) {
    std::atomic<int64_t> total{0};
    const int64_t blocks = x.size(0) / packets.size(0);
    split(packets.size(0), grain / (blocks * x.size(1)), [&](zt_range rows) {
        int64_t count = 0;
        const int status = zt_cpu_ternary_encode(ternary_of(form), x.data_ptr<float>(), indices.data_ptr<int64_t>(),
                                                 blocks, packets.data_ptr<uint8_t>(), packets.size(1), rows, &count);
        total += count;
        return status;
    });
    return number(total);
}

void ternary_decode(const at::Tensor &packets, const at::Tensor &begins, Numbers form, const at::Tensor &indices,
                    const at::Tensor &values) {
    split(begins.size(0), grain / indices.numel() * begins.size(0), [&](zt_range rows) {
        return zt_cpu_ternary_decode(ternary_of(form), packets.data_ptr<uint8_t>(), packets.size(1),
                                     begins.data_ptr<int64_t>(), begins.size(1), indices.data_ptr<int64_t>(),
                                     values.data_ptr<float>(), rows);
    });
}

void sketch_insert(const at::Tensor &x, int64_t seed, const at::Tensor &sketch) {
    const int64_t n = x.size(1), rows = sketch.size(1);
    for (int64_t member = 0; member < x.size(0); ++member)
        split(ZT_SKETCH_LANES, 64, [&](zt_range lanes) {
            return zt_cpu_sketch_insert(x.data_ptr<float>() + member * n, n, seed, rows,
                                        sketch.data_ptr<float>() + member * rows * ZT_SKETCH_LANES, lanes);
        });
}

at::Tensor sketch_peel(const at::Tensor &sketch, const at::Tensor &bits, int64_t seed, const at::Tensor &out) {
    std::atomic<int64_t> total{0};
    split(ZT_SKETCH_LANES, 64, [&](zt_range lanes) {
        std::vector<char> work(zt_sketch_work(out.numel(), sketch.size(0)));
        int64_t left = 0;
        const int status = zt_cpu_sketch_peel(sketch.data_ptr<float>(), bits.data_ptr<uint8_t>(), out.numel(), seed,
                                              sketch.size(0), out.data_ptr<float>(), lanes, work.data(), &left);
        total += left;
        return status;
    });
    return number(total);
}

#endif

// Registers the kernels for a dispatch key; what was registered before is taken back. An empty key only does that.
void serve(const std::string &key) {
    static auto *library = new std::unique_ptr<torch::Library>;  // never freed: torch's dispatcher may end first
    library->reset();
    if (key.empty()) return;
    const auto kind = torch::Library::IMPL;
    *library = std::make_unique<torch::Library>(kind, "zero_topo", c10::parseDispatchKey(key), __FILE__, __LINE__);
#define ZT_KERNEL(name) (*library)->impl(#name, TORCH_FN(name))
    ZT_KERNEL(quantize);
    ZT_KERNEL(dequantize_reduce);
    ZT_KERNEL(requantize);
    ZT_KERNEL(mask_pack);
    ZT_KERNEL(mask_unpack);
    ZT_KERNEL(count_above);
    ZT_KERNEL(compact_above);
    ZT_KERNEL(sketch_insert);
    ZT_KERNEL(sketch_peel);
    ZT_KERNEL(codes_assess);
    ZT_KERNEL(codes_emit);
    ZT_KERNEL(codes_apply);
    ZT_KERNEL(aged_adamw);
#ifndef ZT_FOR_GPU
    ZT_KERNEL(row_largest);
    ZT_KERNEL(ternary_encode);
    ZT_KERNEL(ternary_decode);
#endif
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.attr("torch_version") = TORCH_VERSION;
    m.def("serve", &serve);
#ifdef ZT_FOR_GPU
    m.def("tables", [] { return tables().size(); });
#else
    m.def("best_level", &zt_cpu_best_level);
    m.def("limit", [](int level, int64_t values) {  // for tests: instructions, and values per task
        zt_cpu_limit(level);
        grain = values;
    });
#endif
}
