//! Whole models of `examples/generate`, against the logits of transformers in `tests/models`.

#[path = "../examples/generate/args.rs"]
mod args;
#[path = "../examples/generate/attention.rs"]
mod attention;
#[path = "../examples/generate/config.rs"]
mod config;
#[path = "../examples/generate/model.rs"]
mod model;
#[path = "../examples/generate/rope.rs"]
mod rope;
#[path = "../examples/generate/sampling.rs"]
mod sampling;
#[path = "../examples/generate/text.rs"]
mod text;
#[path = "../examples/generate/weights.rs"]
mod weights;

use args::Args;
use candle_core::{Device, Result, Tensor};
use model::Model;
use moesaic::Engine;
use sampling::{Sampler, Sampling};
use std::fs;
use std::path::{Path, PathBuf};

/// The tokens that run one at a time, as in `tests/models/make.py`.
const DECODED: usize = 6;

fn folder(name: &str) -> PathBuf {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models");
    models.join(name)
}

fn load(name: &str) -> Result<Model> {
    let engine = Engine::cpu().expect("a C compiler");
    Model::load(&engine, &folder(name), 4)
}

/// The largest difference of logits, as a share of the largest logit.
fn difference(found: &Tensor, expected: &Tensor) -> Result<f32> {
    let largest = |tensor: &Tensor| tensor.abs()?.max_all()?.to_scalar::<f32>();
    Ok(largest(&(found - expected)?)? / largest(expected)?)
}

/// Compares prefill, prefill in two parts, and decode with transformers.
fn compare(name: &str, tolerance: f32) -> Result<()> {
    let path = folder(name).join("logits.safetensors");
    let made = candle_core::safetensors::load(path, &Device::Cpu)?;
    let (tokens, expected) = (made["tokens"].to_vec1::<i32>()?, &made["logits"]);
    let tokens: Vec<u32> = tokens.into_iter().map(|token| token as u32).collect();
    let fresh = load(name)?;
    let mut model = fresh.clone();
    let states = model.forward(&tokens)?;
    let whole = model.logits(&states)?;
    let apart = difference(&whole, expected)?;
    assert!(apart <= tolerance, "{name}: one call is {apart} off");
    let (mut model, prompt) = (fresh.clone(), tokens.len() - DECODED);
    let mut parts = vec![
        model.forward(&tokens[..3])?,
        model.forward(&tokens[3..prompt])?,
    ];
    for token in &tokens[prompt..] {
        parts.push(model.forward(&[*token])?);
    }
    let apart = difference(&model.logits(&Tensor::cat(&parts, 0)?)?, expected)?;
    assert!(
        apart <= tolerance,
        "{name}: calls with a cache are {apart} off"
    );
    Ok(())
}

/// Rounding of f32 sums in another order: 1e-5 of the largest logit.
const F32: f32 = 1e-5;
/// Quantized experts take and give bf16, which keeps 8 bits; transformers computed in f32.
const BF16: f32 = 1e-2;

#[test]
fn qwen3_moe_has_the_logits_of_transformers() -> Result<()> {
    compare("qwen3_moe", F32)?;
    compare("qwen3_moe_fp8", BF16)
}

#[test]
fn mixtral_has_the_logits_of_transformers() -> Result<()> {
    compare("mixtral", F32)
}

#[test]
fn olmoe_has_the_logits_of_transformers() -> Result<()> {
    compare("olmoe", F32)
}

#[test]
fn gpt_oss_has_the_logits_of_transformers() -> Result<()> {
    compare("gpt_oss", F32)?;
    compare("gpt_oss_mxfp4", BF16)
}

/// transformers 4 writes the rope as `rope_theta` and `rope_scaling`, and most published models have
/// that form.
#[test]
fn an_older_config_gives_the_same_model() -> Result<()> {
    let (engine, older) = (Engine::cpu().expect("a C compiler"), tempfile::tempdir()?);
    let text = fs::read_to_string(folder("gpt_oss").join("config.json"))?;
    let mut config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let keys = config.as_object_mut().expect("an object");
    let mut rope = keys.remove("rope_parameters").expect("it is there");
    let theta = rope.as_object_mut().and_then(|r| r.remove("rope_theta"));
    keys.insert("rope_theta".to_string(), theta.expect("it is there"));
    keys.insert("rope_scaling".to_string(), rope);
    keys.remove("layer_types");
    fs::write(older.path().join("config.json"), config.to_string())?;
    let file = "model.safetensors";
    fs::copy(folder("gpt_oss").join(file), older.path().join(file))?;
    let tokens: Vec<u32> = (0..12).collect();
    let states = Model::load(&engine, older.path(), 4)?.forward(&tokens)?;
    let expected = load("gpt_oss")?.forward(&tokens)?;
    assert_eq!(states.to_vec2::<f32>()?, expected.to_vec2::<f32>()?);
    Ok(())
}

/// Generates after a prompt, and returns the words.
fn words(model: &Model, sampling: Sampling, most: usize) -> Result<Vec<u32>> {
    let mut sampler = Sampler::new(sampling);
    let (mut model, mut shown) = (model.clone(), Vec::new());
    let show = |token| {
        shown.push(token);
        Ok(())
    };
    let done = text::generate(&mut model, &mut sampler, &[3, 1, 4], most, show)?;
    assert_eq!(done.tokens, shown);
    assert!(done.speeds(3).iter().all(|speed| speed.is_finite()));
    Ok(shown)
}

#[test]
fn text_is_greedy_or_sampled_by_its_seed() -> Result<()> {
    let model = load("mixtral")?;
    let greedy = Sampling {
        temperature: 0.0,
        top_k: None,
        top_p: None,
        seed: 0,
    };
    let sampled = |seed| Sampling {
        temperature: 2.0,
        seed,
        ..greedy
    };
    let likeliest = words(&model, greedy, 8)?;
    assert_eq!(words(&model, Sampling { seed: 7, ..greedy }, 8)?, likeliest);
    assert_eq!(words(&model, sampled(1), 8)?, words(&model, sampled(1), 8)?);
    assert_ne!(words(&model, sampled(1), 8)?, words(&model, sampled(2), 8)?);
    // One token to choose from, by number or by share, is the likeliest.
    for (top_k, top_p) in [(Some(1), None), (None, Some(1e-6))] {
        let sampling = Sampling {
            top_k,
            top_p,
            ..sampled(3)
        };
        assert_eq!(words(&model, sampling, 8)?, likeliest);
    }
    assert!(words(&model, greedy, 0)?.is_empty());
    Ok(())
}

#[test]
fn sampled_tokens_have_their_shares() -> Result<()> {
    let logits = Tensor::new(&[0f32, 3f32.ln(), -20.0, 6f32.ln()], &Device::Cpu)?;
    let count = |top_k, top_p| -> Result<[usize; 4]> {
        let mut sampler = Sampler::new(Sampling {
            temperature: 1.0,
            top_k,
            top_p,
            seed: 5,
        });
        let mut counts = [0; 4];
        for _ in 0..10_000 {
            counts[sampler.next(&logits)? as usize] += 1;
        }
        Ok(counts)
    };
    let near = |counts: [usize; 4], expected: [usize; 4]| {
        let mut pairs = counts.into_iter().zip(expected);
        assert!(pairs.all(|(a, b)| a.abs_diff(b) < 200), "{counts:?}");
    };
    near(count(None, None)?, [1000, 3000, 0, 6000]);
    near(count(Some(2), None)?, [0, 3333, 0, 6667]);
    near(count(None, Some(0.7))?, [0, 3333, 0, 6667]);
    near(count(None, Some(0.5))?, [0, 0, 0, 10_000]);
    Ok(())
}

#[test]
fn a_folder_has_its_tokenizer_and_ends() -> Result<()> {
    let model = load("mixtral")?;
    assert_eq!(model.config().ends, [47]);
    let tokenizer = text::tokenizer(&folder("mixtral"))?;
    let ids = tokenizer.encode("w3 w1 w4", true).expect("words");
    assert_eq!(ids.get_ids(), [3, 1, 4]);
    let mut piece = text::pieces(&tokenizer, ids.get_ids())?;
    assert_eq!(
        (piece(7)?, piece(9)?),
        (" w7".to_string(), " w9".to_string())
    );
    Ok(())
}

#[test]
fn what_is_wrong_with_a_folder_is_named() -> Result<()> {
    let engine = Engine::cpu().expect("a C compiler");
    let broken = tempfile::tempdir()?;
    let config = fs::read_to_string(folder("mixtral").join("config.json"))?;
    let error = |config: &str, weights: bool| -> Result<String> {
        fs::write(broken.path().join("config.json"), config)?;
        if weights {
            let file = "model.safetensors";
            fs::copy(folder("mixtral").join(file), broken.path().join(file))?;
        }
        let model = Model::load(&engine, broken.path(), 4);
        Ok(model.expect_err("it is broken").to_string())
    };
    let missing = Model::load(&engine, &broken.path().join("none"), 4);
    let missing = missing.expect_err("it is missing").to_string();
    let found = [
        (missing, "none/config.json"),
        (
            error(&config.replace("\"mixtral\"", "\"llama\""), false)?,
            "this program runs qwen3_moe",
        ),
        (error("{", false)?, "is no JSON"),
        (
            error(&config.replace("vocab_size", "words"), false)?,
            "`vocab_size` is missing",
        ),
        (
            error(&config.replace("rms_norm_eps", "eps"), false)?,
            "`rms_norm_eps` is missing",
        ),
        (
            error(&config.replace("\"default\"", "\"llama3\""), false)?,
            "default, linear, yarn",
        ),
        (error(&config, false)?, "model.safetensors"),
        (
            error(
                &config.replace("\"vocab_size\": 48", "\"vocab_size\": 50"),
                true,
            )?,
            "[48, 32]",
        ),
    ];
    for (error, named) in found {
        assert!(error.contains(named), "{error}");
    }
    let mut model = load("mixtral")?;
    let error = model.forward(&[99]).expect_err("no such token").to_string();
    assert!(error.contains("token 99"), "{error}");
    let error = text::tokenizer(broken.path())
        .expect_err("there is none")
        .to_string();
    assert!(error.contains("tokenizer.json"), "{error}");
    Ok(())
}

#[test]
fn command_lines_are_read_or_refused() {
    let read = |line: &str| Args::read(line.split_whitespace().map(str::to_string));
    assert_eq!(read("--help"), Ok(None));
    let args = read("--model m --prompt hi --tokens 9 --temperature 0.5 --top-k 3 --seed 4");
    let args = args.expect("it is right").expect("no help");
    assert_eq!((args.tokens, args.sampling.top_k), (9, Some(3)));
    for (line, named) in [
        ("--prompt hi", "`--model` is missing"),
        ("--model m", "`--prompt` is missing"),
        ("--model", "needs a value"),
        ("--modle m", "`--modle` is no option"),
        ("--tokens x", "`--tokens x` is no number"),
        ("--temperature -1", "0 or more"),
        ("--top-k 2", "need a `--temperature`"),
        ("--temperature 1 --top-k 0", "1 or more"),
        ("--temperature 1 --top-p 1.5", "at most 1"),
    ] {
        let error = read(line).expect_err(line);
        assert!(error.contains(named), "{error}");
    }
}
