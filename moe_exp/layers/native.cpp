// native.py compiles this file and calls its exported functions, without Python's lock. fp32 or bf16 in memory,
// fp32 in between: a result is rounded once, when it is stored.
//
// Loops are written for the vectorizer. NaN and Inf pass through, so no -ffast-math. Sums have an order that
// depends on the width alone.

#include <cstdint>
#include <cstring>

namespace {

struct bf16 {
    uint16_t bits;
};

template <class To, class From>
inline To bits_of(From x) {
    To y;
    static_assert(sizeof x == sizeof y, "other size");
    std::memcpy(&y, &x, sizeof y);
    return y;
}

inline float load(float x) { return x; }
inline float load(bf16 x) { return bits_of<float>(uint32_t(x.bits) << 16); }

inline void store(float& to, float x) { to = x; }
inline void store(bf16& to, float x) {  // to the nearest, ties to even
    uint32_t bits = bits_of<uint32_t>(x);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to.bits = uint16_t(x == x ? rounded : 0x7fc0);
}

// exp(x) for x <= 0: x = n ln 2 + r, and a polynomial for r in [-ln 2 / 2, ln 2 / 2] (least squares of the
// relative error, 4e-9). 2^n in two factors, so that the result may be denormal.
inline float exponential(float x) {
    x = x < -104.f ? -104.f : x;
    const float shift = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits
    float shifted = x * 1.44269504f + shift;
    float n = shifted - shift;
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float q = 0.00137511501f;
    q = q * r + 0.00836898759f;
    q = q * r + 0.0416695438f;
    q = q * r + 0.166665182f;
    q = q * r + 0.499999881f;
    float y = 1.f + (r + r * r * q);
    int32_t power = bits_of<int32_t>(shifted) - bits_of<int32_t>(shift);
    int32_t half = power >> 1;
    return y * bits_of<float>((half + 127) << 23) * bits_of<float>((power - half + 127) << 23);
}

struct ValueAndSlope {
    float value, slope;
};

// What the other half of a doubled projection contributes, if the activation has a gate.
struct Plain {
    static inline ValueAndSlope up(float x) { return {x, 1.f}; }
};

// x times the logistic function of factor * x.
template <int thousandths>
struct Sigmoid : Plain {
    static inline ValueAndSlope at(float x) {
        const float factor = thousandths / 1000.f;
        float scaled = factor * x;
        // 1 / (1 + exp(-|x|)) without a division, which takes longer than all else: a parabola that is within 2%,
        // and Newton's method, which squares the error
        float z = exponential(scaled < 0.f ? scaled : -scaled);
        float d = 1.f + z;
        float r = (0.280033683f * d - 1.31740466f) * d + 2.01618314f;
        r = r * (2.f - d * r);
        r = r * (2.f - d * r);
        r = r + r * (1.f - d * r);
        float sigmoid = x < 0.f ? z * r : r;
        float value = x * sigmoid;
        return {value, sigmoid + factor * value * (1.f - sigmoid)};
    }
};

using Silu = Sigmoid<1000>;

// Of gpt-oss, see activations.py: limit 7, offset 1.
struct ClampedSilu {
    static inline ValueAndSlope at(float x) {
        ValueAndSlope y = Sigmoid<1702>::at(x > 7.f ? 7.f : x);
        return {y.value, x > 7.f ? 0.f : y.slope};
    }
    static inline ValueAndSlope up(float x) {
        float clamped = x > 7.f ? 7.f : x < -7.f ? -7.f : x;
        return {clamped + 1.f, x > 7.f || x < -7.f ? 0.f : 1.f};
    }
};

// x times the normal distribution function: its tail is exp(-x^2 / 2) times a polynomial of 1 / (1 + 0.35 |x|)
// (least squares of the relative error, 9e-8).
struct Gelu : Plain {
    static inline ValueAndSlope at(float x) {
        float distance = x < 0.f ? -x : x;
        float t = 1.f / (1.f + 0.35f * distance);
        float bell = exponential(-0.5f * x * x);
        float q = -0.0299627613f;
        q = q * t + 0.147623926f;
        q = q * t - 0.262587517f;
        q = q * t + 0.166257814f;
        q = q * t - 0.0274655856f;
        q = q * t + 0.107138366f;
        q = q * t + 0.119471222f;
        q = q * t + 0.139905244f;
        q = q * t + 0.139619246f;
        float tail = q * t * bell;
        float below = x < 0.f ? tail : 1.f - tail;
        return {x * below, below + x * bell * 0.398942280f};
    }
};

struct SquaredRelu : Plain {
    static inline ValueAndSlope at(float x) {
        float positive = x < 0.f ? 0.f : x;
        return {positive * positive, 2.f * positive};
    }
};

// active = act(hidden) * w, or act(gate) * up * w
template <class Activation, bool gated, class T>
void weighted_activation(int64_t rows, int64_t width, const T* hidden, const float* weights, T* active) {
    for (int64_t r = 0; r < rows; ++r, hidden += width * (1 + gated), active += width) {
        float w = weights[r];
        const T* up = hidden + width;
#pragma omp simd
        for (int64_t j = 0; j < width; ++j) {
            float value = Activation::at(load(hidden[j])).value;
            if (gated) value *= Activation::up(load(up[j])).value;
            store(active[j], value * w);
        }
    }
}

// Its gradients; `gradient` is overwritten by `active`, the input of the second product.
template <class Activation, bool gated, class T>
void weighted_activation_backward(
    int64_t rows, int64_t width, T* gradient, const T* hidden, const float* weights, T* dhidden, float* dweights
) {
    for (int64_t r = 0; r < rows; ++r) {
        float w = weights[r], dw = 0.f;
        const T* up = hidden + width;
        T* dup = dhidden + width;
#pragma omp simd reduction(+ : dw)
        for (int64_t j = 0; j < width; ++j) {
            ValueAndSlope act = Activation::at(load(hidden[j]));
            float g = load(gradient[j]);
            ValueAndSlope u = gated ? Activation::up(load(up[j])) : ValueAndSlope{1.f, 0.f};
            float product = act.value * u.value;
            dw += g * product;
            store(gradient[j], product * w);
            g *= w;
            store(dhidden[j], g * u.value * act.slope);
            if (gated) store(dup[j], g * act.value * u.slope);
        }
        dweights[r] = dw;
        gradient += width;
        hidden += width * (1 + gated);
        dhidden += width * (1 + gated);
    }
}

inline int64_t within(int64_t x, int64_t size) { return x >= 0 && x < size ? x : size - 1; }

}  // namespace

#define ACTIVATION(name, type, T, Activation, gated)                                                          \
    extern "C" void name##_##type(                                                                            \
        int64_t rows, int64_t width, const T* hidden, const float* weights, T* active) {                      \
        weighted_activation<Activation, gated>(rows, width, hidden, weights, active);                         \
    }                                                                                                         \
    extern "C" void name##_backward_##type(                                                                   \
        int64_t rows, int64_t width, T* gradient, const T* hidden, const float* weights, T* dhidden,          \
        float* dweights) {                                                                                    \
        weighted_activation_backward<Activation, gated>(                                                      \
            rows, width, gradient, hidden, weights, dhidden, dweights);                                       \
    }

#define DTYPE(type, T)                                                                                        \
    ACTIVATION(swiglu, type, T, Silu, true)                                                                   \
    ACTIVATION(clamped_swiglu, type, T, ClampedSilu, true)                                                    \
    ACTIVATION(geglu, type, T, Gelu, true)                                                                    \
    ACTIVATION(gelu, type, T, Gelu, false)                                                                    \
    ACTIVATION(squared_relu, type, T, SquaredRelu, false)

DTYPE(float32, float)
DTYPE(bfloat16, bf16)

// A counting sort: slots by expert, and the place of each slot. What is no expert counts as the last one. `ends` is
// memory for one number per expert.
extern "C" void sort_slots(
    int64_t slots, int64_t experts, const int64_t* expert, int64_t* ends, int64_t* slot, int64_t* row
) {
    for (int64_t e = 0; e < experts; ++e) ends[e] = 0;
    for (int64_t n = 0; n < slots; ++n) ++ends[within(expert[n], experts)];
    for (int64_t e = 0, end = 0; e < experts; ++e) {
        end += ends[e];
        ends[e] = end - ends[e];
    }
    for (int64_t n = 0; n < slots; ++n) {
        row[n] = ends[within(expert[n], experts)]++;
        slot[row[n]] = n;
    }
}
