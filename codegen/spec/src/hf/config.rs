//! Typed access to a configuration, with a record of the keys that were read.

use super::codes::Codes;
use super::error::{HfError, shortened};
use super::json::parse_json;
use super::quantization;
use moesaic_kernel::DType;
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::BTreeSet;

/// A parsed configuration: that of the text model, if several are nested.
pub(super) struct Config {
    /// `model_type`, for messages.
    pub model: String,
    values: Map<String, Value>,
    /// The configuration that this one was nested in.
    around: Map<String, Value>,
    /// The element type that the checkpoint names.
    dtype: Option<DType>,
    /// The codes of a quantized checkpoint.
    pub codes: Option<Codes>,
    /// Keys that have been read.
    read: RefCell<BTreeSet<String>>,
}

/// An upper bound beyond any model, so that a broken file cannot make huge lists.
const MAX_LAYERS: usize = 100_000;

/// Keys that nest the language model's configuration. Several may be nested in each other.
const NESTED: &[&str] = &[
    "text_config",
    "llm_config",
    "language_config",
    "thinker_config",
    "language_model_config",
    "text_model_config",
];

impl Config {
    /// Reads the text. Refuses quantization methods that moesaic does not read. `known` returns
    /// true for model types that are read directly, even if they nest other models, unless they
    /// have a `text_config`.
    pub fn parse(text: &str, known: impl Fn(&str) -> bool + Copy) -> Result<Config, HfError> {
        let value = parse_json(text).map_err(|e| HfError::Json(e.to_string()))?;
        let Value::Object(outer) = value else {
            return Err(HfError::Json(format!("it is {}", kind(&value))));
        };
        let named = |m: &Map<String, Value>| m.get("model_type")?.as_str().map(str::to_string);
        let mut config = Config {
            model: named(&outer).unwrap_or_default(),
            values: outer,
            around: Map::new(),
            dtype: None,
            codes: None,
            read: RefCell::default(),
        };
        config.read_types()?;
        // Multimodal models nest the language model, sometimes twice.
        while let Some(inner) = config.nested_model(known) {
            config.model = named(&inner).unwrap_or(config.model);
            config.around = std::mem::replace(&mut config.values, inner);
            config.read_types()?;
        }
        config.read_architecture();
        if config.model.is_empty() {
            return Err(HfError::NoModelType);
        }
        Ok(config)
    }

    /// Replaces the model type by that of the architecture, where files of one architecture name
    /// the types of several other models.
    fn read_architecture(&mut self) {
        let named = self.values.get("architectures").and_then(Value::as_array);
        let named = named.and_then(|list| list.first()?.as_str());
        // Grok 1 and 2, which say `mixtral`, `git` or `grok-1`.
        if named.is_some_and(|name| name.starts_with("Grok1")) {
            self.model = "grok-1".to_string();
        }
    }

    /// Takes the language model's configuration out of this one.
    fn nested_model(&mut self, known: impl Fn(&str) -> bool) -> Option<Map<String, Value>> {
        let keys = if known(&self.model) {
            // A known type is read as it is. Only `text_config` may still hold its values.
            &NESTED[..1]
        } else {
            NESTED
        };
        let object = |key: &&&str| self.values.get(**key).is_some_and(Value::is_object);
        let key = keys.iter().find(object)?;
        match self.values.remove(*key) {
            Some(Value::Object(inner)) => Some(inner),
            _ => None,
        }
    }

    /// Returns the element type of weights and activations: f32 by default, or bf16 in a quantized
    /// checkpoint, the type that such models were quantized from.
    pub fn dtype(&self) -> DType {
        let default = match &self.codes {
            Some(_) => DType::Bf16,
            None => DType::F32,
        };
        self.dtype.unwrap_or(default)
    }

    /// Reads the element type and codes; where this configuration states none, those of the
    /// configuration around it remain.
    fn read_types(&mut self) -> Result<(), HfError> {
        if let Some((key, value)) = self.find(&["dtype", "torch_dtype"]) {
            let name = value.as_str().unwrap_or_default();
            self.dtype = match name.trim_start_matches("torch.") {
                "float32" | "float" => Some(DType::F32),
                "float16" | "half" => Some(DType::F16),
                "bfloat16" => Some(DType::Bf16),
                _ => return Err(self.bad(key, value, "float32, float16 or bfloat16")),
            };
        }
        let said = self.find(&["quantization_config"]).map(|(_, value)| value);
        // MLX has a key of its own, which may stand alone.
        let own = self.peek("quantization");
        let own = own.filter(|value| value.get("bits").is_some());
        if let Some(value) = said.or(own) {
            self.codes = Some(quantization::read(&self.model, value)?);
        }
        Ok(())
    }

    /// Returns the first of `keys` with a value. Null counts as absent.
    pub fn find<'k>(&self, keys: &[&'k str]) -> Option<(&'k str, &Value)> {
        let found = keys.iter().find_map(|key| Some((*key, self.peek(key)?)))?;
        // The record of keys that were read shows which routing keys a family ignores.
        self.read.borrow_mut().insert(found.0.to_string());
        Some(found)
    }

    /// Returns the value of a key without marking it as read. Null counts as absent.
    pub fn peek(&self, key: &str) -> Option<&Value> {
        self.values.get(key).filter(|value| !value.is_null())
    }

    /// Returns the keys whose values nobody has read.
    pub fn unread(&self) -> impl Iterator<Item = (&str, &Value)> {
        let read = self.read.borrow().clone();
        let each = self.values.iter().map(|(key, value)| (key.as_str(), value));
        each.filter(move |(key, value)| !value.is_null() && !read.contains(*key))
    }

    /// Returns true if the key is present with the value null.
    pub fn is_null(&self, key: &str) -> bool {
        self.values.get(key).is_some_and(Value::is_null)
    }

    /// Returns a whole number that may be absent.
    pub fn size_opt(&self, keys: &[&str]) -> Result<Option<usize>, HfError> {
        let Some((key, value)) = self.find(keys) else {
            return Ok(None);
        };
        let expected = || match value.as_f64() {
            Some(number) if number > LARGEST as f64 => format!("a whole number up to {LARGEST}"),
            _ => "a whole number".to_string(),
        };
        let number = whole(value).ok_or_else(|| self.bad(key, value, &expected()))?;
        Ok(Some(number))
    }

    /// Returns a whole number above zero that has no default.
    pub fn positive(&self, keys: &[&str]) -> Result<usize, HfError> {
        match (self.need(keys)?, self.find(keys)) {
            (0, Some((key, value))) => Err(self.bad(key, value, "a whole number above 0")),
            (number, _) => Ok(number),
        }
    }

    /// Returns a whole number.
    pub fn size(&self, keys: &[&str], default: usize) -> Result<usize, HfError> {
        Ok(self.size_opt(keys)?.unwrap_or(default))
    }

    /// Returns a number of layers, bounded so that they can be listed.
    pub fn layers(&self, keys: &[&str], default: usize) -> Result<usize, HfError> {
        match (self.size(keys, default)?, self.find(keys)) {
            // Layers are listed in a vector, so an absurd count must not allocate gigabytes.
            (MAX_LAYERS.., Some((key, value))) => {
                let expected = format!("a number of layers below {MAX_LAYERS}");
                Err(self.bad(key, value, &expected))
            }
            (count, _) => Ok(count),
        }
    }

    /// Returns a whole number that has no default.
    pub fn need(&self, keys: &[&str]) -> Result<usize, HfError> {
        self.size_opt(keys)?.ok_or_else(|| self.missing(keys))
    }

    /// Returns the error for a missing key.
    pub fn missing(&self, keys: &[&str]) -> HfError {
        HfError::MissingKey {
            model: self.model.clone(),
            keys: keys.iter().map(|k| k.to_string()).collect(),
        }
    }

    /// Returns a whole number, or that of layer `at` if the key has a list.
    pub fn size_at(&self, keys: &[&str], at: usize, default: usize) -> Result<usize, HfError> {
        match self.find(keys) {
            Some((key, value @ Value::Array(list))) => list
                .get(at)
                .and_then(whole)
                .ok_or_else(|| self.bad(key, value, "a whole number for each layer")),
            _ => self.size(keys, default),
        }
    }

    /// Returns a number.
    pub fn number(&self, keys: &[&str], default: f64) -> Result<f64, HfError> {
        let Some((key, value)) = self.find(keys) else {
            return Ok(default);
        };
        value
            .as_f64()
            .ok_or_else(|| self.bad(key, value, "a number"))
    }

    /// Returns a number, or `None` where there is none.
    pub fn number_opt(&self, key: &str) -> Result<Option<f64>, HfError> {
        let Some((key, value)) = self.find(&[key]) else {
            return Ok(None);
        };
        let number = value.as_f64();
        number
            .map(Some)
            .ok_or_else(|| self.bad(key, value, "a number"))
    }

    /// Returns a whole number that may be negative.
    pub fn signed(&self, keys: &[&str], default: i64) -> Result<i64, HfError> {
        let Some((key, value)) = self.find(keys) else {
            return Ok(default);
        };
        value
            .as_i64()
            .ok_or_else(|| self.bad(key, value, "a whole number"))
    }

    /// Returns a flag.
    pub fn flag(&self, keys: &[&str], default: bool) -> Result<bool, HfError> {
        let Some((key, value)) = self.find(keys) else {
            return Ok(default);
        };
        value
            .as_bool()
            .ok_or_else(|| self.bad(key, value, "true or false"))
    }

    /// Returns a word.
    pub fn text(&self, keys: &[&str], default: &str) -> Result<String, HfError> {
        let Some((key, value)) = self.find(keys) else {
            return Ok(default.to_string());
        };
        Ok(value
            .as_str()
            .ok_or_else(|| self.bad(key, value, "a string"))?
            .to_string())
    }

    /// Returns a list of whole numbers.
    pub fn sizes(&self, key: &str) -> Result<Option<Vec<usize>>, HfError> {
        let Some((_, value)) = self.find(&[key]) else {
            return Ok(None);
        };
        let list = value
            .as_array()
            .and_then(|list| list.iter().map(whole).collect());
        list.map(Some)
            .ok_or_else(|| self.bad(key, value, "a list of whole numbers"))
    }

    /// Returns a list of whole numbers, written as a list or as text with commas.
    pub fn numbers(&self, key: &str) -> Result<Option<Vec<usize>>, HfError> {
        let Some((_, Value::String(text))) = self.find(&[key]) else {
            return self.sizes(key);
        };
        let parts = text
            .split(',')
            .map(str::trim)
            .filter(|part| !part.is_empty());
        let list = parts.map(|part| part.parse().ok()).collect::<Option<_>>();
        let value = Value::String(text.clone());
        list.map(Some)
            .ok_or_else(|| self.bad(key, &value, "whole numbers divided by commas"))
    }

    /// Returns a list of whole numbers that may be negative.
    pub fn signed_list(&self, key: &str) -> Result<Option<Vec<i64>>, HfError> {
        let Some((_, value)) = self.find(&[key]) else {
            return Ok(None);
        };
        let list = value
            .as_array()
            .and_then(|list| list.iter().map(Value::as_i64).collect());
        list.map(Some)
            .ok_or_else(|| self.bad(key, value, "a list of whole numbers"))
    }

    /// Returns layer `at`'s number in a list. Null and a missing list count as 0.
    pub fn number_at(&self, key: &str, at: usize) -> Result<f64, HfError> {
        let Some((_, value)) = self.find(&[key]) else {
            return Ok(0.0);
        };
        // Lists have null where a layer has no such value.
        let number = |value: &Value| value.as_f64().or(value.is_null().then_some(0.0));
        let entry = value.as_array().and_then(|list| list.get(at));
        entry
            .and_then(number)
            .ok_or_else(|| self.bad(key, value, "a number for each layer"))
    }

    /// Returns a list of words.
    pub fn words(&self, keys: &[&str]) -> Result<Option<Vec<String>>, HfError> {
        let Some((key, value)) = self.find(keys) else {
            return Ok(None);
        };
        let word = |v: &Value| v.as_str().map(str::to_string);
        let list = value
            .as_array()
            .and_then(|list| list.iter().map(word).collect());
        list.map(Some)
            .ok_or_else(|| self.bad(key, value, "a list of strings"))
    }

    /// Makes the configuration of an object inside this one.
    fn inside(&self, values: Map<String, Value>) -> Config {
        Config {
            model: self.model.clone(),
            values,
            around: Map::new(),
            dtype: self.dtype,
            codes: self.codes.clone(),
            read: RefCell::default(),
        }
    }

    /// Returns the object under `key`; empty when absent.
    pub fn nested(&self, key: &str) -> Result<Config, HfError> {
        let values = match self.find(&[key]) {
            None => Map::new(),
            Some((_, Value::Object(inner))) => inner.clone(),
            Some((_, value)) => return Err(self.bad(key, value, "an object")),
        };
        let mut nested = self.inside(values);
        nested.read_types()?;
        Ok(nested)
    }

    /// Returns this configuration with the values of entry `at` of the list `key` in place of its
    /// own.
    pub fn with_entry(&self, key: &str, at: usize) -> Result<Config, HfError> {
        let entry = self.entries(key)?.get(at);
        let Some(Value::Object(own)) = entry else {
            let found = entry.unwrap_or(&Value::Null);
            return Err(self.bad(key, found, "an object for each layer"));
        };
        let mut values = self.values.clone();
        values.extend(own.clone());
        Ok(self.inside(values))
    }

    /// Returns the word `name` of every object in the list `key`.
    pub fn entry_words(&self, key: &str, name: &str) -> Result<Vec<String>, HfError> {
        let word = |entry: &Value| {
            let word = entry.get(name).and_then(Value::as_str);
            let bad = || self.bad(key, entry, &format!("objects with a {name}"));
            word.map(str::to_string).ok_or_else(bad)
        };
        self.entries(key)?.iter().map(word).collect()
    }

    fn entries(&self, key: &str) -> Result<&[Value], HfError> {
        match self.find(&[key]) {
            None => Err(self.missing(&[key])),
            Some((_, Value::Array(list))) => Ok(list),
            Some((_, value)) => Err(self.bad(key, value, "a list of objects")),
        }
    }

    /// Marks as read what was read in a configuration made of this one.
    pub fn mark_read(&self, other: &Config) {
        self.read.borrow_mut().extend(other.read.take());
    }

    /// Returns the object under `key`, from this configuration or from the one around it.
    pub fn beside(&self, key: &str) -> Result<Option<Config>, HfError> {
        if self.find(&[key]).is_some() {
            return self.nested(key).map(Some);
        }
        let around = Config {
            model: self.model.clone(),
            values: self.around.clone(),
            around: Map::new(),
            dtype: self.dtype,
            codes: self.codes.clone(),
            read: RefCell::default(),
        };
        let there = around.find(&[key]).is_some();
        there.then(|| around.nested(key)).transpose()
    }

    /// Returns the error for a value of the wrong type or out of range.
    pub fn bad(&self, key: &str, found: &Value, expected: &str) -> HfError {
        HfError::BadKey {
            model: self.model.clone(),
            key: key.to_string(),
            found: short(found),
            expected: expected.to_string(),
        }
    }

    /// Returns the error for a key that asks for other routing than the family computes.
    pub fn other_routing(&self, key: &str, about: &str) -> HfError {
        HfError::Routing {
            model: self.model.clone(),
            key: key.to_string(),
            value: self.values.get(key).map_or(String::new(), short),
            about: about.to_string(),
        }
    }

    /// Returns the error for a value that the spec cannot express.
    pub fn unsupported(&self, key: &str, axis: &str, remedy: &str) -> HfError {
        HfError::Unsupported {
            model: self.model.clone(),
            key: key.to_string(),
            value: self.values.get(key).map_or("(default)".to_string(), short),
            axis: axis.to_string(),
            remedy: remedy.to_string(),
        }
    }
}

/// The largest size that is read. It keeps sums of a few from overflowing.
const LARGEST: usize = 1 << 30;

/// Returns a whole number written as an integer or as `8.0`, up to [`LARGEST`].
fn whole(value: &Value) -> Option<usize> {
    let float = || {
        value
            .as_f64()
            .filter(|f| f.fract() == 0.0 && *f >= 0.0)
            .map(|f| f as u64)
    };
    let number = value.as_u64().or_else(float)?;
    usize::try_from(number).ok().filter(|n| *n <= LARGEST)
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// Returns a value as text for a message, cut when long.
fn short(value: &Value) -> String {
    shortened(&value.to_string())
}

/// Returns true if the entry of a layer in a list of limits is 0 or null; all entries where the layer
/// is not known.
pub fn unlimited(limits: &Value, layer: Option<usize>) -> bool {
    let none = |limit: &Value| limit.is_null() || limit.as_f64() == Some(0.0);
    let limits = limits.as_array().map_or(&[][..], Vec::as_slice);
    match layer {
        Some(layer) => limits.get(layer).is_none_or(none),
        None => limits.iter().all(none),
    }
}
