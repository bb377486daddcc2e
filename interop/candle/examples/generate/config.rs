//! A model's `config.json`, as far as attention and norms read it.

use crate::rope::{Rope, Yarn};
use candle_core::{Error, Result};
use serde_json::Value;
use std::path::Path;

/// A model family that this program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    Qwen3Moe,
    Mixtral,
    Olmoe,
    GptOss,
}

impl Family {
    const ALL: [(&str, Family); 4] = [
        ("qwen3_moe", Family::Qwen3Moe),
        ("mixtral", Family::Mixtral),
        ("olmoe", Family::Olmoe),
        ("gpt_oss", Family::GptOss),
    ];

    fn of(model_type: &str) -> Result<Family> {
        let found = Family::ALL.iter().find(|(name, _)| *name == model_type);
        found.map(|(_, family)| *family).ok_or_else(|| {
            let known = Family::ALL.map(|(name, _)| name).join(", ");
            Error::Msg(format!(
                "config.json says model_type `{model_type}`, this program runs {known}"
            ))
        })
    }
}

/// The sizes and options of a model outside its experts.
#[derive(Clone, Debug)]
pub struct Config {
    pub family: Family,
    /// The size of the vocabulary.
    pub words: usize,
    pub hidden_size: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub eps: f32,
    /// The inner width of layers without experts.
    pub inner_size: Option<usize>,
    pub rope: Rope,
    /// The largest magnitude of queries, keys and values.
    pub clip_qkv: Option<f64>,
    /// Whether the last projection is the embedding.
    pub tied: bool,
    /// The layers, in order.
    pub layers: Vec<LayerConfig>,
    /// Tokens that end a text.
    pub ends: Vec<u32>,
}

/// The options of one layer.
#[derive(Clone, Copy, Debug)]
pub struct LayerConfig {
    /// The number of tokens that a token sees, itself included; `None` for all before it.
    pub window: Option<usize>,
    /// Whether it has experts, rather than one feed-forward network.
    pub experts: bool,
}

impl Config {
    /// Reads the `config.json` of a folder, and the end tokens of `generation_config.json`.
    ///
    /// # Errors
    /// The file is missing or no JSON, a key is missing, or the model is of another kind.
    pub fn read(folder: &Path) -> Result<Config> {
        let path = folder.join("config.json");
        let config = json(&path)?;
        let mut config = Config::of(&Keys(&config))
            .map_err(|error| Error::Msg(format!("{}: {error}", path.display())))?;
        let generation = folder.join("generation_config.json");
        if generation.exists() {
            let ends = ends(&Keys(&json(&generation)?));
            config.ends = if ends.is_empty() { config.ends } else { ends };
        }
        Ok(config)
    }

    fn of(keys: &Keys<'_>) -> Result<Config> {
        let family = Family::of(keys.text("model_type")?)?;
        let (hidden_size, heads) = (keys.size("hidden_size")?, keys.size("num_attention_heads")?);
        let head_dim = keys.some_size("head_dim");
        let eps = keys.number("rms_norm_eps");
        let eps = eps.ok_or_else(|| Error::Msg("`rms_norm_eps` is missing".to_string()))?;
        let count = keys.size("num_hidden_layers")?;
        let layers = (0..count).map(|at| keys.layer(family, at));
        let config = Config {
            family,
            words: keys.size("vocab_size")?,
            hidden_size,
            heads,
            kv_heads: keys.some_size("num_key_value_heads").unwrap_or(heads),
            head_dim: head_dim.unwrap_or(hidden_size / heads.max(1)),
            eps: eps as f32,
            inner_size: keys.some_size("intermediate_size"),
            rope: keys.rope()?,
            clip_qkv: keys.number("clip_qkv"),
            tied: keys.flag("tie_word_embeddings"),
            layers: layers.collect::<Result<_>>()?,
            ends: ends(keys),
        };
        if config.kv_heads == 0 || !config.heads.is_multiple_of(config.kv_heads) {
            candle_core::bail!(
                "{heads} query heads do not share {} key heads evenly",
                config.kv_heads
            );
        }
        Ok(config)
    }
}

/// The keys of an object.
struct Keys<'v>(&'v Value);

impl Keys<'_> {
    fn text(&self, key: &str) -> Result<&str> {
        let text = self.0.get(key).and_then(Value::as_str);
        text.ok_or_else(|| Error::Msg(format!("`{key}` is missing, or no text")))
    }

    fn size(&self, key: &str) -> Result<usize> {
        let size = self.some_size(key);
        size.ok_or_else(|| Error::Msg(format!("`{key}` is missing, or no whole number")))
    }

    fn some_size(&self, key: &str) -> Option<usize> {
        self.0.get(key)?.as_u64().map(|size| size as usize)
    }

    fn number(&self, key: &str) -> Option<f64> {
        self.0.get(key)?.as_f64()
    }

    fn flag(&self, key: &str) -> bool {
        self.0.get(key).and_then(Value::as_bool).unwrap_or(false)
    }

    fn layer(&self, family: Family, at: usize) -> Result<LayerConfig> {
        let window = self.some_size("sliding_window");
        let window = match family {
            Family::GptOss => window.filter(|_| self.slides(at)),
            Family::Qwen3Moe => window.filter(|_| self.flag("use_sliding_window")),
            Family::Mixtral => window,
            Family::Olmoe => None,
        };
        let step = self.some_size("decoder_sparse_step").unwrap_or(1);
        let listed = self.0.get("mlp_only_layers").and_then(Value::as_array);
        let listed = listed.is_some_and(|list| list.contains(&Value::from(at)));
        let dense = family == Family::Qwen3Moe && (listed || !(at + 1).is_multiple_of(step));
        Ok(LayerConfig {
            window,
            experts: !dense,
        })
    }

    /// Returns true if a layer of gpt-oss has a sliding window: every other one, unless
    /// `layer_types` lists them.
    fn slides(&self, at: usize) -> bool {
        match self.0.get("layer_types").and_then(Value::as_array) {
            Some(types) => types.get(at).and_then(Value::as_str) == Some("sliding_attention"),
            None => at.is_multiple_of(2),
        }
    }

    /// Reads the rotary embedding: `rope_parameters` of transformers 5, or `rope_theta` and
    /// `rope_scaling` of earlier ones.
    fn rope(&self) -> Result<Rope> {
        let object = |key| self.0.get(key).filter(|value| value.is_object());
        let inner = object("rope_parameters").or_else(|| object("rope_scaling"));
        let theta = inner.and_then(|inner| Keys(inner).number("rope_theta"));
        let theta = theta.or_else(|| self.number("rope_theta"));
        let theta = theta.ok_or_else(|| Error::Msg("`rope_theta` is missing".to_string()))?;
        let plain = Rope {
            theta,
            linear: 1.0,
            yarn: None,
        };
        let Some(inner) = inner.map(Keys) else {
            return Ok(plain);
        };
        let kind = inner.text("rope_type").or_else(|_| inner.text("type"));
        let factor = inner.number("factor");
        let factor = factor.ok_or_else(|| Error::Msg("the rope's `factor` is missing".to_string()));
        match kind.unwrap_or("default") {
            "default" => Ok(plain),
            "linear" => Ok(Rope {
                linear: factor?,
                ..plain
            }),
            "yarn" => Ok(Rope {
                yarn: Some(self.yarn(&inner, factor?)?),
                ..plain
            }),
            other => candle_core::bail!(
                "rope_type `{other}` is not one that this program has: default, linear, yarn"
            ),
        }
    }

    fn yarn(&self, rope: &Keys<'_>, factor: f64) -> Result<Yarn> {
        let original = rope.some_size("original_max_position_embeddings");
        let original = match original {
            Some(original) => original,
            None => self.size("max_position_embeddings")?,
        };
        let truncate = rope.0.get("truncate").and_then(Value::as_bool);
        Ok(Yarn {
            factor,
            original: original as f64,
            beta_fast: rope.number("beta_fast").unwrap_or(32.0),
            beta_slow: rope.number("beta_slow").unwrap_or(1.0),
            truncate: truncate.unwrap_or(true),
            attention_factor: rope.number("attention_factor"),
            mscale: rope.number("mscale").zip(rope.number("mscale_all_dim")),
        })
    }
}

/// Returns the end tokens: `eos_token_id` is a number or a list.
fn ends(keys: &Keys<'_>) -> Vec<u32> {
    let number = |value: &Value| value.as_u64().map(|id| id as u32);
    match keys.0.get("eos_token_id") {
        Some(Value::Array(list)) => list.iter().filter_map(number).collect(),
        Some(one) => number(one).into_iter().collect(),
        None => Vec::new(),
    }
}

fn json(path: &Path) -> Result<Value> {
    let problem = |what: String| Error::Msg(format!("{}: {what}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| problem(error.to_string()))?;
    serde_json::from_str(&text).map_err(|error| problem(format!("is no JSON: {error}")))
}
