//! Tilings for AMD GPUs.

use super::{simt_one_matrix, simt_wgrad};
use crate::ops::grouped_gemm::*;
use moesaic_kernel::{DType, MatrixUnit, RocmArch};
use moesaic_spec::Activation;

pub fn forward(d: &GroupedGemmDesc, arch: RocmArch) -> GroupedGemmConfig {
    match unit([d.weights, d.activations], arch) {
        Unit::Mfma => mfma(d, arch),
        Unit::Wmma => wmma(d),
        Unit::Simt => simt(d),
    }
}

/// The instructions that multiply.
enum Unit {
    Simt,
    Mfma,
    Wmma,
}

/// Returns the instructions for operands of these types. Types and architecture alone decide, so
/// that both halves of a layer get the same ones.
fn unit([a, b]: [DType; 2], arch: RocmArch) -> Unit {
    let half = matches!(a, DType::F16 | DType::Bf16);
    match arch.caps().matrix {
        _ if a != b => Unit::Simt,
        MatrixUnit::Mfma(mfma) if mfma.bf16 => Unit::Mfma,
        MatrixUnit::Wmma if half => Unit::Wmma,
        _ => Unit::Simt,
    }
}

/// Returns the rows of a tile. The scan lists row tiles once for both halves of a layer, so this
/// reads only what the halves share.
fn tile_rows(d: &GroupedGemmDesc) -> usize {
    // At 4096 tokens the mean expert then fills a tile of 128.
    let busy = 32 * d.top_k >= d.experts;
    if busy { 128 } else { 64 }
}

/// Returns the bytes of a line of LDS of tiles of 128 rows. It is 128 where two blocks then fit on a compute unit, or nearly: with 160 KB of LDS, not with 64.
fn line_bytes(arch: RocmArch) -> usize {
    if arch.caps().block_shared > 64 << 10 {
        128
    } else {
        64
    }
}

/// Returns the MFMA tiling: two by two waves. Small tiles have long lines of LDS everywhere.
fn mfma(d: &GroupedGemmDesc, arch: RocmArch) -> GroupedGemmConfig {
    let tile_rows = tile_rows(d);
    let row_bytes = if tile_rows == 64 {
        128
    } else {
        line_bytes(arch)
    };
    let gather = d.plain_rows && !d.dense;
    GroupedGemmConfig {
        threads: 256,
        tile_rows,
        tile_depth: row_bytes / d.weights.size(),
        thread_rows: tile_rows / 2,
        family: GemmFamily::Mfma { gather },
        ..matrix(d)
    }
}

/// Returns the tiling of a decode kernel. A block is a wave, which reads the weights of a few
/// columns end to end. It multiplies as a wave of the kernel of larger calls, in the same row
/// tiles, and owns as many lines of weights as one instruction takes.
pub fn decode(d: &GroupedGemmDesc, arch: RocmArch) -> Option<GroupedGemmConfig> {
    let many = forward(d, arch);
    let GemmFamily::Mfma { gather } = many.family else {
        return None;
    };
    // Waves of 64 rows have the larger instruction.
    let lines = if many.thread_rows >= 64 { 32 } else { 16 };
    Some(GroupedGemmConfig {
        threads: arch.caps().wave,
        tile_columns: lines / d.matrices(),
        thread_columns: lines / d.matrices(),
        family: GemmFamily::MfmaDecode { gather },
        ..many
    })
}

/// Returns the WMMA tiling: waves of 32 rows, two side by side.
fn wmma(d: &GroupedGemmDesc) -> GroupedGemmConfig {
    let tile_rows = tile_rows(d);
    let gather = d.plain_rows && !d.dense;
    GroupedGemmConfig {
        threads: 2 * tile_rows as u32,
        tile_rows,
        tile_depth: 64 / d.weights.size(),
        thread_rows: 32,
        family: GemmFamily::Wmma { gather },
        ..matrix(d)
    }
}

/// Returns what both families on matrix cores share: a block has 128 columns, half of them up where
/// there is a gate, and a wave 64.
fn matrix(d: &GroupedGemmDesc) -> GroupedGemmConfig {
    GroupedGemmConfig {
        tile_columns: 128 / d.matrices(),
        thread_columns: 64 / d.matrices(),
        ..simt(d)
    }
}

/// Returns the SIMT tiling. Gate and up columns share a thread: eight rows by eight columns of sums
/// either way.
fn simt(d: &GroupedGemmDesc) -> GroupedGemmConfig {
    GroupedGemmConfig {
        threads: 128,
        tile_rows: 64,
        tile_columns: 128 / d.matrices(),
        tile_depth: 16,
        thread_rows: 8,
        thread_columns: 8 / d.matrices(),
        family: GemmFamily::Simt { gather: false },
    }
}

/// Returns the tiling of a dgrad, with the row tiles of the forward pass. It has one matrix at a
/// time, so a wave has 64 columns of it.
pub fn dgrad(d: &GroupedGemmDgradDesc, arch: RocmArch) -> GroupedGemmConfig {
    let one_matrix = GroupedGemmDesc {
        gated: false,
        ..d.forward()
    };
    let chosen = forward(&one_matrix, arch);
    let crowded = d.half == ExpertGemm::Down && is_long(&d.nonlinearity.activation);
    match chosen.family {
        GemmFamily::Simt { .. } => simt_one_matrix(chosen.tile_rows),
        GemmFamily::Wmma { .. } if crowded => simt_one_matrix(chosen.tile_rows),
        _ => chosen,
    }
}

/// The values of an expression and its slope from which on WMMA may lack registers for them. clang
/// 22 spilled for products of eleven functions, and for none of 29 drawn expressions of 61 to 64
/// values, one of which took all 256.
const LONG: usize = 64;

fn is_long(activation: &Activation) -> bool {
    matches!(activation, Activation::Custom(expression) if expression.nodes().len() > LONG)
}

/// Returns the tiling of a wgrad. A tile is a part of a matrix; depth counts rows. With a gate a
/// block has two tiles of half the height.
pub fn wgrad(d: &GroupedGemmWgradDesc, arch: RocmArch) -> GroupedGemmConfig {
    let gather = d.plain_rows && !d.dense;
    let (thread_rows, family) = match unit([d.left, d.right], arch) {
        Unit::Mfma => (64, GemmFamily::Mfma { gather }),
        Unit::Wmma => (32, GemmFamily::Wmma { gather }),
        Unit::Simt => return simt_wgrad(d),
    };
    let matrices = if d.gated { 2 } else { 1 };
    GroupedGemmConfig {
        threads: 256,
        tile_rows: 128 / matrices,
        tile_columns: 128,
        tile_depth: line_bytes(arch) / d.left.size(),
        thread_rows,
        thread_columns: 64,
        family,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use DType::{Bf16, F16, F32};
    use moesaic_spec::LayerSpec;

    fn spec([w, a]: [DType; 2], experts: usize) -> LayerSpec {
        let text = format!(
            r#"{{"shape":{{"model_dim":63,"hidden_dim":40,"experts":{experts},"top_k":1}}}}"#
        );
        let mut spec: LayerSpec = serde_json::from_str(&text).unwrap();
        spec.precision.weights = w;
        spec.precision.activations = a;
        spec
    }

    fn halves(name: &'static str, types: [DType; 2], experts: usize) -> [GroupedGemmConfig; 2] {
        let spec = spec(types, experts);
        let arch = RocmArch { name };
        [ExpertGemm::Up, ExpertGemm::Down]
            .map(|half| forward(&crate::ops::grouped_gemm::desc::routed(&spec, half), arch))
    }

    #[test]
    fn types_and_architecture_choose_the_unit() {
        let unit = |name, types| halves(name, types, 8)[0].family.name();
        for name in ["gfx90a", "gfx942", "gfx950"] {
            for dtype in [Bf16, F16, F32] {
                assert_eq!(unit(name, [dtype, dtype]), "mfma");
            }
            assert_eq!(unit(name, [F32, Bf16]), "simt");
        }
        for name in ["gfx1100", "gfx1101"] {
            assert_eq!(unit(name, [F16, F16]), "wmma");
            assert_eq!(unit(name, [F32, F32]), "simt");
        }
        for name in ["gfx908", "gfx1030", "gfx1200", "gfx1201"] {
            assert_eq!(unit(name, [Bf16, Bf16]), "simt");
        }
    }

    #[test]
    fn both_halves_have_the_same_rows() {
        for name in ["gfx90a", "gfx950", "gfx1100", "gfx1201"] {
            for experts in [8, 60] {
                let [up, down] = halves(name, [F16, F16], experts);
                assert_eq!(up.tile_rows, down.tile_rows, "{name}, {experts} experts");
                assert_eq!(up.gather(), up.family.name() != "simt", "{name}");
                assert!(!down.gather(), "{name}");
            }
        }
    }

    #[test]
    fn backward_has_the_unit_and_the_rows_of_forward() {
        for name in ["gfx90a", "gfx950", "gfx1100", "gfx1201"] {
            for experts in [8, 60] {
                let [up, _] = halves(name, [F16, F16], experts);
                let arch = RocmArch { name };
                for half in [ExpertGemm::Up, ExpertGemm::Down] {
                    let spec = spec([F16, F16], experts);
                    let d = crate::ops::grouped_gemm::dgrad::routed(&spec, half);
                    let dgrad = dgrad(&d, arch);
                    assert_eq!(dgrad.family.name(), up.family.name(), "{name}");
                    assert_eq!(dgrad.tile_rows, up.tile_rows, "{name}, {experts} experts");
                    let d = crate::ops::grouped_gemm::wgrad::routed(&spec, half);
                    let wgrad = wgrad(&d, arch);
                    assert_eq!(wgrad.family.name(), up.family.name(), "{name}");
                    let simt = up.family.name() == "simt";
                    assert!(simt || wgrad.gather() == (half == ExpertGemm::Up), "{name}");
                }
            }
        }
    }

    #[test]
    fn long_expressions_leave_wmma() {
        let chosen = |text: &str, half| {
            let mut spec = spec([Bf16, Bf16], 8);
            let expression = moesaic_spec::Expression::parse(text).unwrap();
            spec.experts.activation = Activation::Custom(expression);
            let arch = RocmArch { name: "gfx1100" };
            dgrad(&crate::ops::grouped_gemm::dgrad::routed(&spec, half), arch)
        };
        let short = "x / (1 + abs(x)) + 0.5 * erf(x) + log(1 + x^2) * tanh(x)";
        let long = "tanh(x) * exp(-x) * sigmoid(1.7 * x) * softplus(x) * erf(x) * sqrt(1 + x^2) \
                    * log(1 + x^2) * tanh(2 * x) * exp(-0.5 * x) * sigmoid(x) * erf(0.5 * x)";
        let family = |text, half| chosen(text, half).family.name();
        assert_eq!(family(short, ExpertGemm::Down), "wmma");
        assert_eq!(family(long, ExpertGemm::Down), "simt");
        assert_eq!(family(long, ExpertGemm::Up), "wmma", "it has no activation");
        let rows = |half| chosen(long, half).tile_rows;
        assert_eq!(rows(ExpertGemm::Down), rows(ExpertGemm::Up));
    }

    #[test]
    fn factors_of_two_types_are_for_the_ordinary_units() {
        let spec = spec([Bf16, Bf16], 8);
        let arch = RocmArch { name: "gfx942" };
        let unit = |right| {
            let d = crate::ops::grouped_gemm::wgrad::router(&spec, 8, false, right);
            wgrad(&d, arch).family.name()
        };
        assert_eq!([unit(F32), unit(Bf16)], ["mfma", "simt"]);
    }
}
