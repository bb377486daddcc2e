//! Layers of published models.

use crate::{DType, Engine, Error, Layer, LayerOptions, LayerSpec};
use moesaic_spec::hf::{self, Import};
use moesaic_weights::{Checkpoint, LayerReader, LoadOptions, set_expert_formats};
use std::io::ErrorKind;
use std::path::Path;

impl Engine {
    /// Makes a layer of a model from its folder in the form of transformers: the spec from
    /// `config.json`, the weights from the safetensors files beside it. Layers count from zero, as
    /// in the model. Files are mapped and read an expert at a time, so memory holds the layer once.
    ///
    /// On a CPU quantized experts stay the codes that the files hold. [`weights`](crate::weights)
    /// has the steps one by one, for another precision or for tensors that the config does not name.
    ///
    /// ```
    /// use moesaic::Input;
    ///
    /// # use moesaic::example::{engine, wave, write_model};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let (engine, folder) = (engine(), tempfile::tempdir()?);
    /// # write_model(folder.path())?;
    /// # let folder = folder.path();
    /// let layer = engine.layer_from_hf(folder, 1)?; // the second of a Mixtral
    /// let y = layer.forward(&Input::new(3, &wave(3 * 32)))?.y().to_f32();
    /// assert_eq!(y.len(), 3 * 32);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::NoModel`] without a `config.json`, [`Error::Hf`] for a model or a layer that no spec
    /// describes, [`Error::Weights`] for tensors that are not as the config says; otherwise as
    /// [`Engine::layer`].
    pub fn layer_from_hf(&self, folder: impl AsRef<Path>, layer: usize) -> Result<Layer, Error> {
        self.layer_from_hf_with(folder, layer, LayerOptions::default())
    }

    /// Makes a layer of a model as [`Engine::layer_from_hf`] does, with options: for training, or
    /// over ranks, where each rank reads its own experts alone.
    ///
    /// # Errors
    /// As [`Engine::layer_from_hf`] and [`Engine::layer_with`].
    pub fn layer_from_hf_with(
        &self,
        folder: impl AsRef<Path>,
        layer: usize,
        options: LayerOptions<'_>,
    ) -> Result<Layer, Error> {
        let (import, checkpoint) = import_of_folder(folder.as_ref(), layer)?;
        self.layer_of_import(import, &checkpoint, options)
    }

    /// Makes a layer of a model from a GGUF file, as [`Engine::layer_from_hf`] does from a folder.
    /// `x` and `y` have the type of the file's experts where that is a float, else bf16: such a file
    /// does not say in which type the model computes.
    ///
    /// # Errors
    /// [`Error::Gguf`] for a model or a layer that no spec describes, [`Error::Weights`] for a file
    /// that is no GGUF; otherwise as [`Engine::layer`].
    pub fn layer_from_gguf(&self, file: impl AsRef<Path>, layer: usize) -> Result<Layer, Error> {
        let (import, checkpoint) = import_of_gguf(file.as_ref(), layer)?;
        self.layer_of_import(import, &checkpoint, LayerOptions::default())
    }

    /// Makes a layer of nothing but the routed experts of a model's layer, from its folder or its
    /// GGUF file: for a model of another library that routes by itself and has the shared experts
    /// and projections around them. A call takes `topk_ids [T, K]` and `topk_weights [T, K]`. `x`
    /// and `y` have `activations`, or the model's type if you give none.
    ///
    /// # Errors
    /// As [`Engine::layer_from_hf`] and [`Engine::layer_from_gguf`].
    pub fn experts_of_model(
        &self,
        model: impl AsRef<Path>,
        layer: usize,
        activations: Option<DType>,
    ) -> Result<Layer, Error> {
        let (mut import, checkpoint) = match model.as_ref().is_dir() {
            true => import_of_folder(model.as_ref(), layer)?,
            false => import_of_gguf(model.as_ref(), layer)?,
        };
        let load = LoadOptions::default();
        set_expert_formats(&mut import, &checkpoint, load);
        let mut spec = routed_experts(&import.spec);
        spec.precision.activations = activations.unwrap_or(spec.precision.activations);
        let weights = LayerReader::of_sources(&spec, &import.sources, &checkpoint, load)?;
        Ok(self.layer(&spec, &weights)?)
    }

    fn layer_of_import(
        &self,
        mut import: Import,
        checkpoint: &Checkpoint,
        options: LayerOptions<'_>,
    ) -> Result<Layer, Error> {
        let load = LoadOptions::default();
        set_expert_formats(&mut import, checkpoint, load);
        let weights = LayerReader::of_import(&import, checkpoint, load)?;
        Ok(self.layer_with(&import.spec, &weights, options)?)
    }
}

fn import_of_folder(folder: &Path, layer: usize) -> Result<(Import, Checkpoint), Error> {
    let path = folder.join("config.json");
    let config = std::fs::read_to_string(&path);
    let config = config.map_err(|source| match source.kind() {
        ErrorKind::NotFound => Error::NoModel {
            folder: folder.to_path_buf(),
        },
        _ => Error::Io { path, source },
    })?;
    Ok((hf::import(&config, layer)?, Checkpoint::open(folder)?))
}

fn import_of_gguf(file: &Path, layer: usize) -> Result<(Import, Checkpoint), Error> {
    let checkpoint = Checkpoint::open(file)?;
    let metadata = checkpoint.gguf().cloned().unwrap_or_default();
    let import = moesaic_spec::gguf::import(&metadata, layer)?;
    Ok((import, checkpoint))
}

/// Returns a layer of the routed experts alone, between the latent projections if there are any.
fn routed_experts(spec: &LayerSpec) -> LayerSpec {
    let mut alone = spec.decided_elsewhere();
    alone.shape.model_dim = spec.expert_input_dim();
    alone.shape.output_dim = Some(spec.expert_output_dim()).filter(|d| *d != alone.shape.model_dim);
    alone.latent = None;
    alone.shared = Vec::new();
    alone
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collectives::{Call, threads};
    use crate::example::{engine, wave, write_model};
    use crate::{Input, Mesh, Parallel, Tensor};
    use moesaic_weights::{QuantizeTo, quantize};

    fn y(layer: &Layer) -> Vec<f32> {
        let (x, dtype) = (wave(3 * 32), layer.spec().precision.activations);
        let mut input = Input {
            tokens: 3,
            ..Input::default()
        };
        input.insert("x", Tensor::rounded(dtype, &[3, 32], &x));
        layer.forward(&input).expect("it runs").y().to_f32()
    }

    #[test]
    fn a_folder_and_a_gguf_file_give_the_same_layer() {
        let folder = tempfile::tempdir().expect("a folder");
        write_model(folder.path()).expect("a model");
        let file = folder.path().join("model.gguf");
        let to = QuantizeTo::gguf("q8_0").expect("a known type");
        quantize(folder.path(), &file, to, &|_| {}).expect("a file");
        let expected = y(&engine().layer_from_hf(folder.path(), 1).expect("a layer"));
        let found = y(&engine().layer_from_gguf(&file, 1).expect("a layer"));
        let largest = expected.iter().fold(0.0f32, |most, v| most.max(v.abs()));
        assert!(largest > 0.0);
        for (found, expected) in found.iter().zip(&expected) {
            let error = (found - expected).abs() / largest;
            // The file's codes have eight bits, and its layer computes in bf16.
            assert!(error < 0.05, "{found}, not {expected}");
        }
    }

    #[test]
    fn experts_of_a_model_take_the_decisions_of_its_router() {
        let folder = tempfile::tempdir().expect("a folder");
        write_model(folder.path()).expect("a model");
        let whole = engine().layer_from_hf(folder.path(), 1).expect("a layer");
        let x = wave(3 * 32);
        let mut input = Input::new(3, &x);
        let read = ["y", "topk_ids", "topk_weights"];
        let decided = whole.forward(input.reading(&read)).expect("it runs");
        for name in ["topk_ids", "topk_weights"] {
            input.insert(name, decided.get(name).expect("it is read").clone());
        }
        let experts = engine().experts_of_model(folder.path(), 1, None);
        let found = experts.expect("a layer").forward(&input).expect("it runs");
        assert_eq!(found.y().to_f32(), decided.y().to_f32());
    }

    #[test]
    fn ranks_share_a_layer_of_a_folder() {
        let folder = tempfile::tempdir().expect("a folder");
        write_model(folder.path()).expect("a model");
        let expected = y(&engine().layer_from_hf(folder.path(), 1).expect("a layer"));
        let device = |_| Ok(engine().device().clone());
        let ranks = threads::run(2, device, |mut world| {
            let mesh = Mesh::new(
                &mut world,
                Parallel {
                    ep: 2,
                    ..Parallel::default()
                },
            )?;
            let options = LayerOptions::over(&mesh);
            let layer = engine().layer_from_hf_with(folder.path(), 1, options)?;
            let found = y(&layer);
            world
                .finish(&Call::new("end"))
                .map_err(crate::EngineError::from)?;
            Ok::<_, Error>(found)
        });
        for found in ranks.expect("two ranks") {
            assert_eq!(found.expect("a rank").expect("it runs"), expected);
        }
    }

    #[test]
    fn errors_say_which_file_or_layer() {
        let folder = tempfile::tempdir().expect("a folder");
        let error = engine()
            .layer_from_hf(folder.path(), 1)
            .expect_err("no model");
        assert!(matches!(error, Error::NoModel { .. }));
        assert!(error.to_string().contains("hf download"), "{error}");
        write_model(folder.path()).expect("a model");
        let error = engine()
            .layer_from_hf(folder.path(), 7)
            .expect_err("two layers");
        assert!(matches!(error, Error::Hf(_)), "{error}");
        let file = folder.path().join("model.safetensors");
        let error = engine()
            .layer_from_gguf(&file, 1)
            .expect_err("no GGUF file");
        assert!(matches!(error, Error::Gguf(_)), "{error}");
        assert_eq!(format!("{error:?}"), error.to_string());
    }
}
