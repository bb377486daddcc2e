//! Router replay: a trainer takes the experts that a serving engine chose.
//!
//! vLLM (`enable_return_routed_experts`) returns `routed_experts`, one array of expert ids
//! `[tokens, layers, K]` for all layers of a model. [`RoutedExperts`] reads and writes it, as bytes
//! or as an `.npy` file. [`RoutedExperts::replay`] turns one layer of it into a layer that looks
//! its experts up there: weights and gradients still follow from your router's logits, for the
//! recorded experts alone.
//!
//! ```
//! use moesaic_spec::LayerSpec;
//! use moesaic_train::replay::{IdType, RoutedExperts, RecordShape};
//!
//! let spec = LayerSpec::from_toml("shape = { model_dim = 64, hidden_dim = 32, experts = 8, top_k = 2 }")
//!     .expect("a valid spec");
//! // Three tokens of a model with one layer.
//! let shape = RecordShape { tokens: 3, layers: 1, top_k: 2 };
//! let record = RoutedExperts::new(shape, vec![7, 0, 1, 2, 3, 7])?;
//! let again = RoutedExperts::from_npy(&record.to_npy(IdType::U8)?)?;
//! assert_eq!(again, record);
//!
//! let replay = again.replay(&spec, 0)?;
//! // Add this tensor to the layer's weights, and call it with `token_ids`: places in the record.
//! assert_eq!(replay.table.shape, [3, 2]);
//! assert_eq!(replay.spec.router.table_rows, Some(3));
//! # Ok::<(), moesaic_train::replay::ReplayError>(())
//! ```

mod error;
mod npy;

pub use error::ReplayError;

use moesaic_spec::{Chooser, LayerSpec, LogitsFormula, NoiseKind, Router, RouterKind, Select};
use moesaic_tensor::Tensor;
use std::path::Path;

/// The name of the weight that [`Replay::table`] is.
pub const TABLE: &str = "router.table";

/// The experts that every layer of a model chose for each token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutedExperts {
    shape: RecordShape,
    /// `[tokens, layers, top_k]`.
    ids: Vec<i32>,
}

/// The sizes of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordShape {
    /// Tokens, those of all requests in a row.
    pub tokens: usize,
    /// Layers. vLLM counts all of a model's, dense ones too.
    pub layers: usize,
    /// Experts of a token.
    pub top_k: usize,
}

/// The integers that a written record has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdType {
    /// Up to 256 experts.
    U8,
    /// Up to 65,536 experts.
    U16,
    /// Any number of experts.
    I32,
}

/// A layer that takes its experts from a record.
#[derive(Clone, Debug)]
pub struct Replay {
    /// The layer's spec, with a `table` router. It has no selection bias, groups or noise, which
    /// decide what the record has decided.
    pub spec: LayerSpec,
    /// Its weight [`TABLE`], `[tokens, top_k]` of i32. `token_ids` are rows of it, so a
    /// micro-batch passes the places of its tokens in the record.
    pub table: Tensor<'static>,
}

impl IdType {
    /// Returns the number of experts whose ids the type holds.
    pub fn experts(self) -> usize {
        match self {
            IdType::U8 => 1 << 8,
            IdType::U16 => 1 << 16,
            IdType::I32 => 1 << 31,
        }
    }

    /// Returns the smallest type that holds the ids of a number of experts.
    pub fn for_experts(experts: usize) -> IdType {
        let types = [IdType::U8, IdType::U16];
        let fits = types
            .into_iter()
            .find(|element| experts <= element.experts());
        fits.unwrap_or(IdType::I32)
    }
}

impl RecordShape {
    fn sizes(self) -> [usize; 3] {
        [self.tokens, self.layers, self.top_k]
    }

    /// Returns the token and the layer of the id at a place.
    fn at(self, place: usize) -> (usize, usize) {
        let row = place / self.top_k.max(1);
        (row / self.layers.max(1), row % self.layers.max(1))
    }
}

impl RoutedExperts {
    /// Takes ids `[tokens, layers, top_k]`, in this order.
    ///
    /// # Errors
    /// [`ReplayError::Count`] if that is not their number.
    pub fn new(shape: RecordShape, ids: Vec<i32>) -> Result<RoutedExperts, ReplayError> {
        let wanted = shape.sizes();
        let product = wanted
            .iter()
            .try_fold(1usize, |all, &size| all.checked_mul(size));
        match product {
            Some(product) if product == ids.len() => Ok(RoutedExperts { shape, ids }),
            _ => Err(ReplayError::Count {
                wanted,
                found: ids.len(),
            }),
        }
    }

    /// Joins the `topk_ids` of layers, each `[tokens, top_k]`, as outputs of [`forward`] have them.
    ///
    /// [`forward`]: moesaic_engine::Layer::forward
    ///
    /// # Errors
    /// [`ReplayError::Count`] if a layer has another number of ids.
    pub fn of_layers(
        tokens: usize,
        top_k: usize,
        layers: &[Vec<i32>],
    ) -> Result<RoutedExperts, ReplayError> {
        let shape = RecordShape {
            tokens,
            layers: layers.len(),
            top_k,
        };
        let mut ids = Vec::with_capacity(layers.iter().map(Vec::len).sum());
        let each = tokens.checked_mul(top_k);
        if let Some(other) = layers.iter().find(|layer| Some(layer.len()) != each) {
            let wanted = [tokens, 1, top_k];
            let found = other.len();
            return Err(ReplayError::Count { wanted, found });
        }
        for token in 0..tokens {
            for layer in layers {
                ids.extend(&layer[token * top_k..][..top_k]);
            }
        }
        RoutedExperts::new(shape, ids)
    }

    /// Returns the sizes.
    pub fn shape(&self) -> RecordShape {
        self.shape
    }

    /// Returns all ids, `[tokens, layers, top_k]`.
    pub fn ids(&self) -> &[i32] {
        &self.ids
    }

    /// Returns the ids of one layer, `[tokens, top_k]`.
    ///
    /// # Errors
    /// [`ReplayError::Layer`] if there is none.
    pub fn layer(&self, layer: usize) -> Result<Vec<i32>, ReplayError> {
        let RecordShape { layers, top_k, .. } = self.shape;
        if layer >= layers {
            return Err(ReplayError::Layer { layer, layers });
        }
        let tokens = self.ids.chunks((layers * top_k).max(1));
        Ok(tokens
            .flat_map(|token| &token[layer * top_k..][..top_k])
            .copied()
            .collect())
    }

    /// Reads an `.npy` array, as vLLM sends and NumPy saves it.
    ///
    /// # Errors
    /// [`ReplayError::Format`] for what is not an array of integers of three axes in C order, whole;
    /// [`ReplayError::Expert`] for an id that is negative or beyond 32 bits.
    pub fn from_npy(bytes: &[u8]) -> Result<RoutedExperts, ReplayError> {
        let array = npy::read(bytes)?;
        let &[tokens, layers, top_k] = array.shape.as_slice() else {
            let found = array.shape;
            return Err(ReplayError::Format(format!(
                "its shape is {found:?}, not [tokens, layers, top_k]"
            )));
        };
        let shape = RecordShape {
            tokens,
            layers,
            top_k,
        };
        let elements = array.data.chunks(array.element.bytes()).enumerate();
        let ids = elements.map(|(place, bytes)| {
            let id = array.element.value(bytes);
            let (token, layer) = shape.at(place);
            i32::try_from(id)
                .ok()
                .filter(|id| *id >= 0)
                .ok_or(ReplayError::Expert {
                    token,
                    layer,
                    id,
                    experts: IdType::I32.experts(),
                })
        });
        RoutedExperts::new(shape, ids.collect::<Result<_, _>>()?)
    }

    /// Returns an `.npy` array of this element type.
    ///
    /// # Errors
    /// [`ReplayError::Expert`] for an id that does not fit.
    pub fn to_npy(&self, element: IdType) -> Result<Vec<u8>, ReplayError> {
        let experts = element.experts();
        check_ids(&self.ids, experts, |place| self.shape.at(place))?;
        Ok(npy::write(&self.ids, self.shape, element))
    }

    /// Reads an `.npy` file.
    ///
    /// # Errors
    /// [`ReplayError::File`], and those of [`from_npy`](RoutedExperts::from_npy).
    pub fn read(path: &Path) -> Result<RoutedExperts, ReplayError> {
        let bytes = std::fs::read(path).map_err(|source| file(path, source))?;
        RoutedExperts::from_npy(&bytes)
    }

    /// Writes an `.npy` file.
    ///
    /// # Errors
    /// [`ReplayError::File`], and those of [`to_npy`](RoutedExperts::to_npy).
    pub fn write(&self, path: &Path, element: IdType) -> Result<(), ReplayError> {
        std::fs::write(path, self.to_npy(element)?).map_err(|source| file(path, source))
    }

    /// Returns a layer that takes its experts from a layer of the record.
    ///
    /// A score keeps its formula, and so do renormalization, scale, capacity and losses. The order
    /// of a token's slots is the record's.
    ///
    /// # Errors
    /// [`ReplayError::Layer`], [`ReplayError::TopK`], [`ReplayError::Expert`] and
    /// [`ReplayError::Twice`] if the record is not of such a layer; [`ReplayError::Router`] for
    /// routers other than linear ones, and where weights follow from more than the chosen experts;
    /// [`ReplayError::Spec`] if a table router cannot have the layer's other options.
    pub fn replay(&self, spec: &LayerSpec, layer: usize) -> Result<Replay, ReplayError> {
        let ids = self.layer(layer)?;
        let replayed = self.spec(spec)?;
        let (experts, top_k) = (spec.routed_experts(), spec.shape.top_k);
        check_ids(&ids, experts, |place| (place / top_k, layer))?;
        check_twice(&ids, top_k, layer)?;
        Ok(Replay {
            spec: replayed,
            table: Tensor::owned(&[self.shape.tokens, top_k], ids),
        })
    }

    /// Returns the spec of [`replay`](RoutedExperts::replay), which all layers of the record share.
    /// Kernels for it can be compiled ahead of a run, and serve records of every length.
    ///
    /// # Errors
    /// [`ReplayError::TopK`], [`ReplayError::Router`] and [`ReplayError::Spec`].
    pub fn spec(&self, spec: &LayerSpec) -> Result<LayerSpec, ReplayError> {
        let (wanted, found) = (spec.shape.top_k, self.shape.top_k);
        if wanted != found {
            return Err(ReplayError::TopK { wanted, found });
        }
        looked_up(spec, self.shape.tokens)
    }
}

/// Checks that each id is below a number of experts. `at` returns the token and the layer of a
/// place.
fn check_ids(
    ids: &[i32],
    experts: usize,
    at: impl Fn(usize) -> (usize, usize),
) -> Result<(), ReplayError> {
    let fits = |id: i32| usize::try_from(id).is_ok_and(|id| id < experts);
    match ids.iter().position(|&id| !fits(id)) {
        None => Ok(()),
        Some(place) => {
            let (token, layer) = at(place);
            let id = i64::from(ids[place]);
            Err(ReplayError::Expert {
                token,
                layer,
                id,
                experts,
            })
        }
    }
}

/// Checks that no token has an expert twice.
fn check_twice(ids: &[i32], top_k: usize, layer: usize) -> Result<(), ReplayError> {
    for (token, ids) in ids.chunks(top_k.max(1)).enumerate() {
        let twice = (1..ids.len()).find(|&slot| ids[..slot].contains(&ids[slot]));
        if let Some(slot) = twice {
            let id = ids[slot];
            return Err(ReplayError::Twice { token, layer, id });
        }
    }
    Ok(())
}

fn file(path: &Path, source: std::io::Error) -> ReplayError {
    let path = path.to_path_buf();
    ReplayError::File { path, source }
}

/// Returns the layer with a table of `rows` tokens, without what selects experts.
fn looked_up(spec: &LayerSpec, rows: usize) -> Result<LayerSpec, ReplayError> {
    let router = &spec.router;
    let def = router.kind.def();
    let linear = def
        .logits
        .is_some_and(|logits| logits.formula == LogitsFormula::Linear);
    if def.chooser != Chooser::Scores || !linear {
        return Err(ReplayError::Router {
            key: "kind",
            value: format!("{:?}", def.name),
            because: "a table's weights come from linear logits",
        });
    }
    if let Some((key, value, because)) = beyond_choice(router) {
        return Err(ReplayError::Router {
            key,
            value,
            because,
        });
    }
    let default = Router::default();
    let replayed = LayerSpec {
        router: Router {
            kind: RouterKind::Table,
            table_rows: Some(rows),
            select: default.select,
            select_bias: default.select_bias,
            select_bias_on: default.select_bias_on,
            groups: None,
            blocks: None,
            always_chosen: default.always_chosen,
            noise: default.noise,
            noise_kind: default.noise_kind,
            ..router.clone()
        },
        ..spec.clone()
    };
    match replayed.validate() {
        Ok(()) => Ok(replayed),
        Err(problems) => {
            let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
            Err(ReplayError::Spec(problems.join("; ")))
        }
    }
}

/// Returns an option by which weights follow from more than the chosen experts: its key, its value
/// and the reason.
fn beyond_choice(router: &Router) -> Option<(&'static str, String, &'static str)> {
    let select = |because| Some(("select", format!("{:?}", router.select), because));
    match router.select {
        Select::SparseMixer(_) => return select("a weight depends on which choice was first"),
        Select::ExpertChoice(_) => return select("a token has as many experts as choose it"),
        Select::TopK | Select::PerGroup(_) | Select::Sinkhorn(_) => {}
    }
    let chooses = matches!(
        router.noise_kind,
        NoiseKind::Gumbel | NoiseKind::GumbelSecond
    );
    if router.noise != 0.0 && !chooses {
        let value = format!("{:?}", router.noise);
        return Some(("noise", value, "this noise changes weights, too"));
    }
    let random = router.random_second;
    random.then(|| {
        let because = "a second choice may be dropped, which a record does not say";
        ("random_second", "true".to_string(), because)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> RoutedExperts {
        let layers = [vec![1, 0, 3, 2, 4, 1], vec![5, 4, 0, 1, 2, 3]];
        RoutedExperts::of_layers(3, 2, &layers).unwrap()
    }

    fn spec(router: &str) -> LayerSpec {
        let shape = "shape = { model_dim = 8, hidden_dim = 8, experts = 6, top_k = 2 }";
        LayerSpec::from_toml(&format!("{shape}\nrouter = {{ {router} }}")).unwrap()
    }

    #[test]
    fn layers_lie_between_tokens_and_choices() {
        let record = record();
        assert_eq!(record.ids()[..4], [1, 0, 5, 4]);
        assert_eq!(record.layer(1).unwrap(), [5, 4, 0, 1, 2, 3]);
        let said = record.layer(2).unwrap_err().to_string();
        assert_eq!(said, "the record has layers 0 to 1 and not 2");
    }

    #[test]
    fn every_type_is_read_as_it_was_written() {
        for element in [IdType::U8, IdType::U16, IdType::I32] {
            let bytes = record().to_npy(element).unwrap();
            assert_eq!(RoutedExperts::from_npy(&bytes).unwrap(), record());
        }
        let wide = RoutedExperts::of_layers(1, 1, &[vec![300]]).unwrap();
        let said = wide.to_npy(IdType::U8).unwrap_err().to_string();
        assert_eq!(said, "token 0, layer 0: expert 300 is not from 0 to 255");
        assert_eq!(IdType::for_experts(256), IdType::U8);
        assert_eq!(IdType::for_experts(257), IdType::U16);
    }

    /// Bytes that NumPy 2.4 saves: `np.save(f, np.arange(6, dtype=d).reshape(1, 3, 2))`.
    #[test]
    fn what_numpy_saves_is_read() {
        for (descr, bytes) in [("|u1", 1), ("<i2", 2), ("<i4", 4), ("<i8", 8)] {
            let mut header =
                format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': (1, 3, 2), }}");
            header.push_str(&" ".repeat(127 - 10 - header.len()));
            header.push('\n');
            let mut file = b"\x93NUMPY\x01\x00v\x00".to_vec();
            file.extend(header.bytes());
            for id in 0..6i64 {
                file.extend(&id.to_le_bytes()[..bytes]);
            }
            let found = RoutedExperts::from_npy(&file).unwrap();
            assert_eq!(found.ids(), [0, 1, 2, 3, 4, 5]);
            assert_eq!(found.shape().sizes(), [1, 3, 2]);
        }
    }

    #[test]
    fn other_files_are_errors() {
        let bytes = record().to_npy(IdType::I32).unwrap();
        let spoilt = |from: &str, to: &str| {
            let at = bytes.windows(from.len()).position(|w| w == from.as_bytes());
            let mut bytes = bytes.clone();
            bytes[at.unwrap()..][..to.len()].copy_from_slice(to.as_bytes());
            RoutedExperts::from_npy(&bytes).unwrap_err().to_string()
        };
        assert!(spoilt("NUMPY", "numpy").contains("does not begin as an .npy file"));
        assert!(spoilt("<i4", "<f4").contains("its elements are \"<f4\""));
        assert!(spoilt("<i4", ">i4").contains("little endian"));
        assert!(spoilt("False", "True ").contains("order is not C's"));
        assert!(spoilt("(3, 2, 2)", "(3, 4)   ").contains("not [tokens, layers, top_k]"));
        assert!(spoilt("(3, 2, 2)", "(3, 2, 3)").contains("not what [3, 2, 3] needs"));
        assert!(spoilt("(3, 2, 2)", "(3, x, 2)").contains("no shape of sizes"));
        assert!(spoilt("shape", "shade").contains("no `shape`"));
        for end in 0..bytes.len() {
            RoutedExperts::from_npy(&bytes[..end]).unwrap_err();
        }
        let mut negative = bytes.clone();
        let last = negative.len() - 4;
        negative[last..].copy_from_slice(&(-1i32).to_le_bytes());
        let said = RoutedExperts::from_npy(&negative).unwrap_err().to_string();
        assert!(
            said.starts_with("token 2, layer 1: expert -1 is not"),
            "{said}"
        );
        let missing = RoutedExperts::read(Path::new("/no/such/file.npy")).unwrap_err();
        assert!(missing.to_string().starts_with("/no/such/file.npy: "));
    }

    #[test]
    fn layers_that_do_not_fit_are_errors() {
        let said = |spec: &LayerSpec, layer| record().replay(spec, layer).unwrap_err().to_string();
        let wide = LayerSpec::from_toml(
            "shape = { model_dim = 8, hidden_dim = 8, experts = 6, top_k = 3 }",
        );
        assert!(said(&wide.unwrap(), 0).contains("the layer has top_k = 3"));
        let few = LayerSpec::from_toml(
            "shape = { model_dim = 8, hidden_dim = 8, experts = 5, top_k = 2 }",
        );
        let few = few.unwrap();
        assert_eq!(
            said(&few, 1),
            "token 0, layer 1: expert 5 is not from 0 to 4"
        );
        record().replay(&few, 0).unwrap();
        let cosine = spec("kind = \"cosine\", projection_dim = 4");
        assert!(said(&cosine, 0).contains("router.kind = \"cosine\" cannot be replayed"));
        let refused = [
            "select = { sparse-mixer = 0.1 }",
            "noise = 0.5",
            "random_second = true, renormalize = \"sum\"",
        ];
        for router in refused {
            assert!(
                said(&spec(router), 0).contains("cannot be replayed"),
                "{router}"
            );
        }
        let twice = RoutedExperts::of_layers(2, 2, &[vec![0, 1, 3, 3]]).unwrap();
        let twice = twice.replay(&spec("renormalize = \"sum\""), 0).unwrap_err();
        assert_eq!(
            twice.to_string(),
            "token 1, layer 0: expert 3 is there twice"
        );
        assert!(RoutedExperts::of_layers(usize::MAX, 2, &[vec![]]).is_err());
    }

    #[test]
    fn selection_goes_and_weights_stay() {
        let deepseek = spec(
            "score = \"sigmoid\", select_bias = true, renormalize = \"sum\", scale = 2.5, \
             groups = { count = 3, keep = 2, stat = \"top2-sum\" }",
        );
        let replay = record().replay(&deepseek, 1).unwrap();
        let router = &replay.spec.router;
        assert_eq!((&router.groups, router.select_bias), (&None, false));
        assert_eq!((router.scale, router.score), (2.5, deepseek.router.score));
        replay.spec.validate().unwrap();
        assert_eq!(replay.table.to_f32(), [5.0, 4.0, 0.0, 1.0, 2.0, 3.0]);
    }
}
