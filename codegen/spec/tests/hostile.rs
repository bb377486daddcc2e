//! Broken texts and broken specs always get an answer, never a panic.

use moesaic_kernel::DType;
use moesaic_spec::testing::{SampleRng, sample};
use moesaic_spec::*;

const TEXTS: &[&str] = &[
    include_str!("../../../examples/specs/deepseek-v3.toml"),
    include_str!("../../../examples/specs/gpt-oss-20b.toml"),
    include_str!("../../../examples/specs/switch-base-8.toml"),
    include_str!("../../../examples/specs/tutel-helloworld.toml"),
];

/// Reads a text and renders the refusal, if there is one.
fn survive(text: &str) {
    match LayerSpec::from_toml(text) {
        Ok(spec) => {
            assert_eq!(spec.validate(), Ok(()));
            assert_eq!(LayerSpec::from_toml(&spec.to_toml()).as_ref(), Ok(&spec));
        }
        Err(error) => {
            assert!(!error.problems().is_empty());
            assert!(error.render("mutated.toml", false).starts_with("error"));
            assert!(error.render("mutated.toml", true).contains("error"));
            for (span, message) in error.spans() {
                assert!(span.start <= span.end && !message.is_empty());
            }
        }
    }
}

#[test]
fn mutated_bytes() {
    const SPICE: &[u8] = b"=[]{}\"'.,#\n\r\t -+_0e9\\\0\x7f\xc3\xa9\xff";
    for seed in 0..6_000 {
        let rng = &mut SampleRng::new(seed);
        let mut bytes = rng.pick(TEXTS).as_bytes().to_vec();
        for _ in 0..rng.between(1, 6) {
            let at = rng.between(0, bytes.len() - 1);
            match rng.between(0, 3) {
                0 => drop(bytes.remove(at)),
                1 => bytes.insert(at, rng.pick(SPICE)),
                2 => bytes[at] = rng.pick(SPICE),
                _ => bytes.insert(at, bytes[at]),
            }
        }
        survive(&String::from_utf8_lossy(&bytes));
    }
}

#[test]
fn mutated_lines() {
    for seed in 0..3_000 {
        let rng = &mut SampleRng::new(seed);
        let mut lines: Vec<&str> = rng.pick(TEXTS).lines().collect();
        for _ in 0..rng.between(1, 5) {
            let (at, to) = (
                rng.between(0, lines.len() - 1),
                rng.between(0, lines.len() - 1),
            );
            match rng.between(0, 3) {
                0 if lines.len() > 1 => drop(lines.remove(at)),
                1 => lines.insert(to, lines[at]),
                2 => lines.swap(at, to),
                _ => lines.extend(rng.pick(TEXTS).lines().skip(rng.between(8, 20)).take(2)),
            }
        }
        let ending = rng.pick(&["\n", "\r\n"]);
        survive(&lines.join(ending));
    }
}

#[test]
fn replaced_values() {
    let values = [
        "0",
        "-1",
        "1e400",
        "nan",
        "inf",
        "9223372036854775807",
        "18446744073709551616",
        "true",
        "\"\"",
        "\"x\"",
        "[]",
        "[[1]]",
        "{}",
        "{ a = 1 }",
        "1979-05-27",
        "0xff",
        "1.5",
        "''",
        "\"top-k\"",
        "[{}, 3, { hidden_dim = 8 }]",
        "{ sparse-mixer = 1e999 }",
        "65536",
        "1024",
    ];
    for seed in 0..4_000 {
        let rng = &mut SampleRng::new(seed);
        let text = rng.pick(TEXTS);
        let lines: Vec<String> = text
            .lines()
            .map(|line| match line.split_once(" = ") {
                Some((key, _)) if rng.one_in(5) => format!("{key} = {}", rng.pick(&values)),
                _ => line.to_string(),
            })
            .collect();
        survive(&lines.join("\n"));
    }
}

#[test]
fn odd_texts() {
    let long = format!("{} = 1", "k".repeat(100_000));
    let nested = format!("a = {}{}", "[".repeat(5_000), "]".repeat(5_000));
    let texts = [
        "",
        "\n",
        "\u{feff}",
        "[shape]",
        "[[shape]]",
        "shape = 1",
        "shape.experts = 1",
        "[shape.experts]",
        "[[shared.x]]",
        "\"\" = 1",
        "\"a\\nb\" = 1",
        "\"\\u0000\" = 2",
        "é = 1",
        "[router.groups.count]",
        "[router.select]",
        "router = []",
        "\0",
        "a.b.c = 1\na.b = 2",
    ];
    texts.iter().for_each(|text| survive(text));
    survive(&long);
    survive(&nested);
}

/// Sets one field to an unreasonable value.
fn spoil(spec: &mut LayerSpec, rng: &mut SampleRng) {
    match rng.between(0, 2) {
        0 => spoil_size(spec, rng),
        1 => spoil_number(spec, rng),
        _ => spoil_choice(spec, rng),
    }
}

fn spoil_size(spec: &mut LayerSpec, rng: &mut SampleRng) {
    let sizes = [0, 1, 2, 3, 1000, 1024, 65_536, 65_537, usize::MAX];
    let size = rng.pick(&sizes);
    match rng.between(0, 11) {
        0 => spec.shape.model_dim = size,
        1 => spec.shape.hidden_dim = size,
        2 => spec.shape.experts = size,
        3 => spec.shape.top_k = size,
        4 => spec.shape.output_dim = Some(size),
        5 => spec.experts.identity = size,
        6 => spec.router.table_rows = Some(size),
        7 => spec.router.projection_dim = Some(size),
        8 => spec.capacity.rows = Some(size),
        9 => spec.capacity.align = size,
        _ => {
            let (count, keep) = (size, rng.pick(&sizes));
            let (stat, mask) = (GroupStat::Top2Sum, GroupMask::Zero);
            spec.router.groups = Some(Groups {
                count,
                keep,
                stat,
                mask,
            });
        }
    }
}

fn spoil_number(spec: &mut LayerSpec, rng: &mut SampleRng) {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    let number = rng.pick(&[0.0, -0.0, 1.0, -1.0, 1e-50, 1e300, nan, inf, -inf]);
    match rng.between(0, 13) {
        0 => spec.router.scale = number,
        1 => spec.router.norm_order = number,
        2 => spec.router.renormalize_eps = number,
        3 => spec.router.jitter = number,
        4 => spec.router.noise = number,
        5 => spec.router.select = Select::SparseMixer(number),
        6 => spec.capacity.factor = number,
        7 => spec.experts.clamp = Some(number),
        8 => spec.experts.alpha = number,
        9 => spec.router.logit_softcap = Some(number),
        10 => spec.experts.up_softcap = Some(number),
        11 => {
            spec.latent = Some(Latent {
                dim: 8,
                bias: false,
                norm_eps: rng.pick(&[None, Some(number)]),
                input_norm_eps: rng.pick(&[None, Some(number)]),
            });
        }
        12 => spec.experts.output_norm_eps = Some(number),
        _ => spec.experts.up_offset = number,
    }
}

fn spoil_choice(spec: &mut LayerSpec, rng: &mut SampleRng) {
    let other = sample(rng.bits());
    match rng.between(0, 12) {
        0 => spec.shared.extend([SharedExpert {
            hidden_dim: rng.pick(&[0, 3, usize::MAX]),
            gate: SharedGate::None,
            bias: None,
            clamp: None,
            activation: None,
        }]),
        1 => spec.losses.extend([Loss {
            kind: LossKind::Z,
            coefficient: rng.pick(&[0.1, f64::NAN, -1.0]),
            sequence_length: rng.pick(&[None, Some(0), Some(usize::MAX)]),
        }]),
        2 => spec.precision.weights = rng.pick(&[DType::I32, DType::F16, DType::Bf16]),
        3 => spec.precision.activations = DType::I64,
        4 => spec.name = rng.pick(&["", "a/b", "*/", "x\ny", "-", "é"]).to_string(),
        5 => spec.router = other.router,
        6 => spec.capacity = other.capacity,
        7 => spec.experts = other.experts,
        8 => spec.losses = other.losses,
        9 => spec.router.kind = other.router.kind,
        10 => spec.router.score = other.router.score,
        11 => spec.precision.expert_gradients = rng.pick(&[DType::I64, DType::F16, DType::Bf16]),
        _ => spec.shape.top_k = other.shape.top_k,
    }
}

#[test]
fn spoilt_specs() {
    let (mut valid, mut invalid) = (0, 0);
    for seed in 0..20_000 {
        let mut spec = sample(seed);
        let rng = &mut SampleRng::new(!seed);
        for _ in 0..rng.between(1, 3) {
            spoil(&mut spec, rng);
        }
        let text = spec.to_toml();
        match spec.validate() {
            Ok(()) => {
                valid += 1;
                canonical_tensors(&spec);
                assert_eq!(LayerSpec::from_toml(&text).as_ref(), Ok(&spec), "{text}");
            }
            Err(problems) => {
                invalid += 1;
                assert!(LayerSpec::from_toml(&text).is_err(), "{text}\n{problems:?}");
                assert!(problems.iter().all(|p| !p.to_string().is_empty()));
            }
        }
    }
    assert!(
        valid > 1_000 && invalid > 1_000,
        "{valid} valid, {invalid} invalid"
    );
}

/// One slip can cause thousands of problems, and nobody reads them all.
#[test]
fn an_error_shows_twenty_problems() {
    let text = format!("name = \"a\"\nexp{}\n", "^2/x".repeat(6_000));
    let error = LayerSpec::from_toml(&text).expect_err("it is no TOML");
    assert!(error.problems().len() > 1_000);
    let said = error.render("layer.toml", false);
    assert!(said.len() < 20_000, "{} bytes", said.len());
    let count = error.problems().len();
    let end = format!("error: {count} problems in layer.toml; the first 20 are shown");
    assert!(said.ends_with(&end), "{said}");
    assert_eq!(said.matches("\nerror").count(), 20);
}
