// Sampling by the law (docs/law.md): Gumbel-max with counter-based noise.
//
// Exact, yet hardly slower than making the noise. A vector pass computes an upper bound of every token's score,
//
//     G = -log(-log(1 - u)) <= -log(u)      with log2(u) read off a float's bits, which is at most .09 too low,
//
// and only tokens whose bound reaches the best exact score so far, less a slack for float32 rounding, are evaluated in
// float64 by the definition. So the answer is the definition's, on every instruction set.
//
// Sums of exponentials are float64 over 16 lanes and one tree: their order depends on the row alone.
#include "gumbel.h"

#include "law_lanes.h"
#include "pool.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace {

constexpr int kBlock = 256;  // tokens whose bounds are held at a time
constexpr int kMaxBest = 16;
constexpr float kMaxNoise = 22.9f;          // G <= 33 ln 2
constexpr int kFewSurvivors = 256;          // of top-k: sorting them is quicker than passes over the row
constexpr long kTokensPerThread = 65536;    // waking a thread costs more than less work
constexpr double kNucleusMargin = 1e-10;    // of the mass: far above the rounding of any order of summation

// ---- a row of logits ------------------------------------------------------------------------------------------------

// Read in groups of 16; the last 32 tokens, if fewer, are filled up with -inf.
struct Row {
    const float* x;
    int32_t size, tail_start;
    float tail[kGroup];

    Row(const float* logits, long vocab_size) : x(logits), size((int32_t)vocab_size), tail_start(size / kGroup * kGroup) {
        for (int i = 0; i < kGroup; ++i) tail[i] = tail_start + i < size ? x[tail_start + i] : -kInfinity;
    }
    int32_t padded() const { return (size + kGroup - 1) / kGroup * kGroup; }
    f32x16 load(int32_t v) const { return rs_load(v < tail_start ? x + v : tail + (v - tail_start)); }
    f32x16 kept(int32_t v, const Cut& cut) const { return cut.keeps_all() ? load(v) : apply_cut(load(v), v, cut); }
};

// The largest logit; NaN if the row holds one.
float largest(const Row& row) {
    f32x16 best = rs_set1(-kInfinity);
    unsigned nan = 0;
    for (int32_t v = 0; v < row.padded(); v += 16) {
        f32x16 x = row.load(v);
        nan |= unordered(x);
        best = rs_max(x, best);
    }
    return nan ? __builtin_nanf("") : rs_hmax(best);
}

// Sum over kept tokens of exp((x - m) / T), m the largest logit: at least 1.
double sum_of_exp(const Row& row, const Cut& cut, float m, double inverse_temperature) {
    const Doubles centre = set_double(m), inverse = set_double(inverse_temperature);
    Doubles sum[kParts];
    for (Doubles& part : sum) part = set_double(0.0);
    for (int32_t v = 0; v < row.padded(); v += 16) {
        Doubles x[kParts];
        widen(row.kept(v, cut), x);
        for (int i = 0; i < kParts; ++i) sum[i] = add(sum[i], exp_of_negative(mul(sub(x[i], centre), inverse)));
    }
    double lanes[16];
    for (int i = 0; i < kParts; ++i) store_doubles(lanes + i * kDoubles, sum[i]);
    for (int width = 8; width >= 1; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    return lanes[0];
}

// ---- the best tokens under the noise --------------------------------------------------------------------------------

// The `k` best so far by (score descending, id ascending).
struct Best {
    int k, count = 0;
    double score[kMaxBest + 1];
    int32_t id[kMaxBest + 1];
    explicit Best(int wanted) : k(wanted) {}
    bool full() const { return count == k; }
    double worst() const { return score[k - 1]; }
    void offer(double s, int32_t v) {
        int at = count;
        for (; at > 0 && (s > score[at - 1] || (s == score[at - 1] && v < id[at - 1])); --at)
            score[at] = score[at - 1], id[at] = id[at - 1];
        score[at] = s, id[at] = v;
        if (count < k) ++count;
    }
};

double gumbel(uint32_t word) {
    double u = ((double)word + 0.5) * 0x1p-32;
    return -::log(-::log(1.0 - u));  // 1 - u is exact
}

// The index of the largest of `count` floats (a multiple of 16), the first of equals.
int argmax(const float* values, int count) {
    f32x16 best = rs_load(values);
    for (int i = 16; i < count; i += 16) best = rs_max(best, rs_load(values + i));
    f32x16 top = rs_set1(rs_hmax(best));
    for (int i = 0;; i += 16)
        if (unsigned equal = at_least(rs_load(values + i), top)) return i + __builtin_ctz(equal);
}

// Scores are x / T + G. Bounds are relative to the largest logit: (x - m) / T + bound of G.
struct NoisyScores {
    const Row& row;
    const Cut& cut;
    NoiseKey key;
    float m;
    double temperature;
    float inverse;  // of the temperature
    double origin;  // m / T
    float threshold = -kInfinity;  // a token below it cannot be among the best
    alignas(64) float bound[kBlock];
    alignas(64) uint32_t word[kBlock];

    NoisyScores(const Row& r, const Cut& c, uint64_t seed, uint32_t t, float largest, double T)
        : row(r), cut(c), key(seed, t), m(largest), temperature(T), origin((double)largest / T) {
        inverse = (float)(1.0 / T < 3e38 ? 1.0 / T : 3e38);  // too small only makes bounds too large
    }

    double exact(int32_t v, int at) const { return (double)row.x[v] / temperature + gumbel(word[at]); }

    // The slack covers the rounding of the bounds (relative 2e-7 of a distance, absolute 3e-5) and that of the exact scores.
    void raise_threshold(double worst) {
        double relative = worst - origin, size = __builtin_fabs(relative);
        double slack = 1e-4 + 1e-6 * (64 + size) + 8 * 0x1p-52 * (__builtin_fabs(origin) + size);
        threshold = (float)(relative - slack);
    }

    // Fills `bound` for the tokens from v on; true if one of them may be among the best.
    bool fill(int32_t v, int count) {
        const f32x16 centre = rs_set1(m), inv = rs_set1(inverse), least = rs_set1(threshold);
        const f32x16 hopeless = rs_set1(threshold - kMaxNoise);
        const float ln2 = 0.69314718f;
        const f32x16 base = rs_set1(ln2 * (24 + 127)), slope = rs_set1(ln2 * 0x1p-23f);
        unsigned any = 0;
        for (int i = 0; i < count; i += kGroup) {
            f32x16 low = rs_mul(rs_sub(row.kept(v + i, cut), centre), inv);
            f32x16 high = rs_mul(rs_sub(row.kept(v + i + 16, cut), centre), inv);
            if (at_least(rs_max(low, high), hopeless)) {
                f32x16 bits[2];
                random_group((uint32_t)(v + i) / 4, key, word + i, bits);
                low = rs_add(low, rs_fnma(bits[0], slope, base));
                high = rs_add(high, rs_fnma(bits[1], slope, base));
                any |= at_least(rs_max(low, high), least);
            }
            rs_store(bound + i, low);
            rs_store(bound + i + 16, high);
        }
        return any != 0;
    }

    // Evaluates what may be among the best, the most promising first.
    void harvest(int32_t v, int count, Best* best) {
        for (;;) {
            int at = argmax(bound, count);
            if (!(bound[at] >= threshold) || bound[at] == -kInfinity) return;
            bound[at] = -kInfinity;
            best->offer(exact(v + at, at), v + at);
            if (best->full()) raise_threshold(best->worst());
        }
    }

    void search(Best* best) {
        for (int32_t v = 0; v < row.padded(); v += kBlock) {
            int count = row.padded() - v < kBlock ? row.padded() - v : kBlock;
            if (fill(v, count)) harvest(v, count, best);
        }
    }
};

// Without noise the score is the logit. Ids ascend, so a later token must be better to displace a full list's last.
void best_plain(const Row& row, Best* best) {
    float worst = -kInfinity;
    for (int32_t v = 0; v < row.padded(); v += 16)
        for (unsigned better = greater(row.load(v), rs_set1(worst)); better != 0; better &= better - 1) {
            int32_t id = v + __builtin_ctz(better);
            best->offer(row.x[id], id);
            if (best->full()) worst = (float)best->worst();
        }
}

// ---- masks ----------------------------------------------------------------------------------------------------------

// Local to this file, and with it every std:: template used on it: see the rules in simd.h.
struct Entry {
    float logit;
    int32_t id;
    double weight;  // exp((x - m) / T), by the definition
};
struct ComesBefore {
    bool operator()(const Entry& a, const Entry& b) const { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }
};
using Entries = std::vector<Entry>;

// Some tokens: how many, and what they amount to (their number, or their mass).
struct Amount {
    long count;
    double total;
};

// Where a mask ends: its last token has a logit in [low, high). What lies at or above each of the two.
struct Bracket {
    float low, high;
    Amount at_low, at_high;
};

long count(const Row& row, const Cut& cut) {
    long found = 0;
    for (int32_t v = 0; v < row.padded(); v += 16)
        found += __builtin_popcount(greater(row.kept(v, cut), rs_set1(-kInfinity)));
    return found;
}

// Steps down from the largest logit m until the tokens above amount to `wanted`, then halves the bracket until few are in
// it. `survivors`: an earlier mask.
template <typename Measure>
Bracket bracket_of(const Row& row, const Cut& survivors, float m, float step, double wanted, Measure measure) {
    const long few = 16 + row.size / 256;  // sorting them costs about as much as one more pass over the row
    Bracket bracket = {m, kInfinity, measure(survivors.above(m)), {0, 0.0}};
    if (step < 1e-6f * __builtin_fabsf(m)) step = 1e-6f * __builtin_fabsf(m);  // or it would not step at all
    for (; bracket.at_low.total < wanted && bracket.low > -__FLT_MAX__; step *= 2) {
        bracket.high = bracket.low, bracket.at_high = bracket.at_low;
        bracket.low = m - step > -__FLT_MAX__ ? m - step : -__FLT_MAX__;
        bracket.at_low = measure(survivors.above(bracket.low));
    }
    while (bracket.at_low.count - bracket.at_high.count > few) {
        float middle = bracket.low / 2 + (bracket.high < m ? bracket.high : m) / 2;
        if (!(middle > bracket.low && middle < bracket.high)) break;  // equal logits
        Amount amount = measure(survivors.above(middle));
        if (amount.total >= wanted) {
            bracket.low = middle, bracket.at_low = amount;
        } else {
            bracket.high = middle, bracket.at_high = amount;
        }
    }
    return bracket;
}

// The survivors with a logit in [low, high), in the order of the law.
void gather(const Row& row, const Cut& survivors, float low, float high, Entries* list) {
    list->clear();
    for (int32_t v = 0; v < row.padded(); v += 16)
        for (unsigned found = at_least(row.kept(v, survivors), rs_set1(low)); found != 0; found &= found - 1) {
            int32_t id = v + __builtin_ctz(found);
            if (row.x[id] < high) list->push_back({row.x[id], id, 0.0});
        }
    std::sort(list->begin(), list->end(), ComesBefore());
}

double weigh(Entries* list, float m, double temperature) {
    double mass = 0.0;
    for (Entry& entry : *list) mass += entry.weight = ::exp(((double)entry.logit - (double)m) / temperature);
    return mass;
}

Cut cut_after(const Entry& last) { return {last.logit, last.id}; }

// The first k in the order of the law, 0 < k < size.
Cut top_k_cut(const Row& row, float m, int32_t k, Entries* list) {
    auto measure = [&](const Cut& cut) {
        long found = count(row, cut);
        return Amount{found, (double)found};
    };
    Bracket bracket = bracket_of(row, Cut(), m, 1.0f, k, measure);
    gather(row, Cut(), bracket.low, bracket.high, list);
    size_t last = (size_t)(k - bracket.at_high.count - 1);
    return last < list->size() ? cut_after((*list)[last]) : Cut();  // what is missing is -inf
}

// The nucleus by the letter of the definition: everything sorted, sums in that order.
Cut nucleus_by_definition(const Row& row, const Cut& survivors, float m, double temperature, double top_p, Entries* list) {
    gather(row, survivors, -__FLT_MAX__, kInfinity, list);
    double wanted = top_p * weigh(list, m, temperature), mass = 0.0;
    size_t i = 0;
    while ((mass += (*list)[i].weight) < wanted) ++i;
    return cut_after((*list)[i]);
}

// The same without sorting everything. Where the end is so close that the order of summation could matter, the definition
// decides.
Cut nucleus_cut(const Row& row, const Cut& survivors, float m, double temperature, double top_p, Entries* list) {
    auto measure = [&](const Cut& cut) { return Amount{count(row, cut), sum_of_exp(row, cut, m, 1.0 / temperature)}; };
    double total = measure(survivors).total, wanted = top_p * total, margin = kNucleusMargin * total;
    Bracket bracket = bracket_of(row, survivors, m, (float)temperature, wanted, measure);
    gather(row, survivors, bracket.low, bracket.high, list);
    weigh(list, m, temperature);
    double before = bracket.at_high.total;
    for (const Entry& entry : *list) {
        double mass = before + entry.weight;
        if (mass >= wanted && (before > wanted - margin || mass < wanted + margin)) break;
        if (mass >= wanted) return cut_after(entry);
        before = mass;
    }
    return nucleus_by_definition(row, survivors, m, temperature, top_p, list);
}

Cut mask(const Row& row, float m, double temperature, int32_t top_k, float top_p) {
    static thread_local Entries list;
    Cut cut;
    bool some = top_k > 0 && top_k < row.size;
    if (some) cut = top_k_cut(row, m, top_k, &list);
    if (top_p >= 1.0f) return cut;
    return some && top_k <= kFewSurvivors ? nucleus_by_definition(row, cut, m, temperature, (double)top_p, &list)
                                          : nucleus_cut(row, cut, m, temperature, (double)top_p, &list);
}

double normaliser_of(const Row& row, const Cut& cut, float m, double temperature) {
    return ::log(sum_of_exp(row, cut, m, 1.0 / temperature));
}

float log_prob_of(const Row& row, int32_t id, float m, double temperature, double normaliser) {
    return (float)(((double)row.x[id] - m) / temperature - normaliser);
}

int threads_for(long rows, long vocab_size, int num_threads) {
    long worth = rows * vocab_size / kTokensPerThread;
    long most = worth < rows ? worth : rows;
    return most < 1 ? 1 : most < num_threads ? (int)most : num_threads;
}

// 0, or which parameter has a value out of range: 1 temperature, 2 top_k, 3 top_p.
int refused(long rows, const float* temperatures, const int32_t* top_k, const float* top_p) {
    for (long i = 0; i < rows; ++i) {
        if (!(temperatures[i] >= 0.0f && temperatures[i] < kInfinity)) return 1;
        if (top_k && top_k[i] < 0) return 2;
        if (top_p && !(top_p[i] > 0.0f && top_p[i] <= 1.0f)) return 3;
    }
    return 0;
}

}  // namespace

// All return what `refused` says, and do nothing unless it is 0.

// logits [rows, vocab_size] at `stride`.
RS_EXPORT int RS_NAME(gumbel_sample)(const float* logits, long stride, long rows, long vocab_size, const uint64_t* seeds,
                                      const int32_t* positions, const float* temperatures, const int32_t* top_k,
                                      const float* top_p, int32_t* tokens, float* log_probs, float* tempered_log_probs,
                                     uint8_t* finite, int num_threads) {
    if (int code = refused(rows, temperatures, top_k, top_p)) return code;
    rs_parallel_for(rows, threads_for(rows, vocab_size, num_threads), [=](long i) {
        Row row(logits + i * stride, vocab_size);
        float m = largest(row);
        finite[i] = m > -kInfinity && m < kInfinity;
        tokens[i] = 0;
        log_probs[i] = tempered_log_probs[i] = __builtin_nanf("");
        if (!finite[i]) return;
        double temperature = temperatures[i], normaliser = normaliser_of(row, Cut(), m, 1.0);
        Best best(1);
        if (temperature == 0.0) {
            best_plain(row, &best);
            tempered_log_probs[i] = 0.0f;
        } else {
            Cut cut = mask(row, m, temperature, top_k[i], top_p[i]);
            NoisyScores(row, cut, seeds[i], (uint32_t)positions[i], m, temperature).search(&best);
            bool same = cut.keeps_all() && temperature == 1.0;
            double tempered = same ? normaliser : normaliser_of(row, cut, m, temperature);
            tempered_log_probs[i] = log_prob_of(row, best.id[0], m, temperature, tempered);
        }
        tokens[i] = best.id[0];
        log_probs[i] = log_prob_of(row, best.id[0], m, 1.0, normaliser);
    });
    return 0;
}

// The log-prob of a given token a row under softmax(logits / T), T > 0: for the token that gumbel_sample draws without masks,
// the bits that it returns. NaN where the row is not finite.
RS_EXPORT int RS_NAME(gumbel_log_probs)(const float* logits, long stride, long rows, long vocab_size, const int32_t* tokens,
                                        const float* temperatures, float* log_probs, int num_threads) {
    if (int code = refused(rows, temperatures, nullptr, nullptr)) return code;
    rs_parallel_for(rows, threads_for(rows, vocab_size, num_threads), [=](long i) {
        Row row(logits + i * stride, vocab_size);
        float m = largest(row);
        double temperature = temperatures[i];
        bool finite = m > -kInfinity && m < kInfinity;
        log_probs[i] = finite ? log_prob_of(row, tokens[i], m, temperature, normaliser_of(row, Cut(), m, temperature))
                              : __builtin_nanf("");
    });
    return 0;
}

RS_EXPORT int RS_NAME(gumbel_candidates)(const float* logits, long stride, long rows, long vocab_size, long k,
                                          const uint64_t* seeds, const int32_t* positions, const float* temperatures,
                                          int32_t* tokens, float* scores, int num_threads) {
    if (int code = refused(rows, temperatures, nullptr, nullptr)) return code;
    rs_parallel_for(rows, threads_for(rows, vocab_size, num_threads), [=](long i) {
        Row row(logits + i * stride, vocab_size);
        float m = largest(row);
        Best best((int)k);
        double shift = 0.0;
        if (m > -kInfinity && m < kInfinity) {
            double temperature = temperatures[i];
            shift = m + ::log(sum_of_exp(row, Cut(), m, 1.0));
            if (temperature == 0.0) {
                best_plain(row, &best);
            } else {
                NoisyScores(row, Cut(), seeds[i], (uint32_t)positions[i], m, temperature).search(&best);
                shift /= temperature;
            }
        }
        for (long j = 0; j < k; ++j) {
            float score = j < best.count ? (float)(best.score[j] - shift) : -kInfinity;
            tokens[i * k + j] = score > -kInfinity ? best.id[j] : -1;
            scores[i * k + j] = score;
        }
    });
    return 0;
}
