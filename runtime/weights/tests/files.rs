//! Weight files: layouts, element types, shards, damage, writing.

use half::bf16;
use moesaic_kernel::DType;
use moesaic_spec::{GateLayout, LayerSpec, canonical_tensors, hf};
use moesaic_tensor::{Tensor, Tensors};
use moesaic_weights::*;
use std::fs;
use std::path::Path;

fn spec(layout: GateLayout) -> LayerSpec {
    let mut spec = LayerSpec::from_toml(
        "[shape]\nmodel_dim = 6\nhidden_dim = 5\nexperts = 3\ntop_k = 2\n\
         [experts]\nbias = true\n[[shared]]\nhidden_dim = 4\n",
    )
    .unwrap();
    spec.experts.layout = layout;
    spec
}

/// Returns canonical tensors whose elements count through all tensors: 0, 1, 2, …
fn numbered(spec: &LayerSpec) -> Tensors<'static> {
    let mut next = 0f32;
    let mut weights = Tensors::new();
    for tensor in canonical_tensors(spec) {
        let count: usize = tensor.shape.iter().product();
        let values: Vec<f32> = (0..count).map(|i| next + i as f32).collect();
        next += count as f32;
        weights.insert(tensor.name.clone(), Tensor::copied(&tensor.shape, &values));
    }
    weights
}

/// Replaces gate and up of every set of experts by one fused tensor.
fn fuse(weights: &Tensors<'static>, interleaved: bool) -> Tensors<'static> {
    let mut fused = weights.clone();
    for (name, gate) in weights {
        let Some(at) = name.find(".gate.") else {
            continue;
        };
        let (set, kind) = (&name[..at], &name[at + 6..]);
        let up = &weights[&format!("{set}.up.{kind}")];
        let axis = gate.shape.len() - if kind == "bias" { 1 } else { 2 };
        let mut shape = gate.shape.clone();
        shape[axis] *= 2;
        let row: usize = gate.shape[axis + 1..].iter().product::<usize>() * 4;
        let rows = if interleaved {
            row
        } else {
            row * gate.shape[axis]
        };
        let pieces = gate.data.chunks(rows).zip(up.data.chunks(rows));
        let bytes: Vec<u8> = pieces.flat_map(|(g, u)| [g, u].concat()).collect();
        fused.remove(name);
        fused.remove(&format!("{set}.up.{kind}"));
        let tensor = Tensor {
            dtype: DType::F32,
            shape,
            data: bytes.into(),
        };
        fused.insert(format!("{set}.gate_up.{kind}"), tensor);
    }
    fused
}

fn load(spec: &LayerSpec, path: &Path) -> Result<Tensors<'static>, WeightsError> {
    load_canonical(spec, &Checkpoint::open(path)?, LoadOptions::default())
}

fn refusal(spec: &LayerSpec, path: &Path) -> String {
    let text = load(spec, path).unwrap_err().to_string();
    text.replace(&path.display().to_string(), "FILE")
}

#[test]
fn canonical_files_of_every_layout() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w.safetensors");
    let want = numbered(&spec(GateLayout::Split));
    write_safetensors(&path, &want).unwrap();
    assert_eq!(load(&spec(GateLayout::Split), &path).unwrap(), want);
    for (layout, interleaved) in [(GateLayout::Concat, false), (GateLayout::Interleaved, true)] {
        let fused = fuse(&want, interleaved);
        assert!(fused.contains_key("experts.gate_up.bias"));
        assert!(fused.contains_key("shared.0.gate_up.weight"));
        write_safetensors(&path, &fused).unwrap();
        assert_eq!(load(&spec(layout), &path).unwrap(), want, "{layout:?}");
    }
    assert_eq!(
        refusal(&spec(GateLayout::Split), &path),
        "FILE has no tensor for `experts.gate.weight`; it has `experts.gate_up.weight`: say layout = \"concat\" or \"interleaved\" under [experts]"
    );
    let mut mixed = fuse(&want, true);
    mixed.retain(|name, _| !name.starts_with("shared."));
    let shared = want.iter().filter(|(name, _)| name.starts_with("shared."));
    mixed.extend(shared.map(|(name, tensor)| (name.clone(), tensor.clone())));
    write_safetensors(&path, &mixed).unwrap();
    assert_eq!(load(&spec(GateLayout::Interleaved), &path).unwrap(), want);
}

#[test]
fn widening_is_exact_and_narrowing_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w.safetensors");
    let mut spec = spec(GateLayout::Split);
    let mut weights = numbered(&spec);
    let up = weights.get_mut("experts.up.weight").unwrap();
    let values: Vec<bf16> = up
        .to_f64()
        .iter()
        .map(|v| bf16::from_f64(v / 3.0))
        .collect();
    *up = Tensor::copied(&up.shape, &values);
    write_safetensors(&path, &weights).unwrap();
    let wide = load(&spec, &path).unwrap();
    assert_eq!(wide["experts.up.weight"].dtype, DType::F32);
    let exact: Vec<f64> = values.iter().map(|v| v.to_f64()).collect();
    assert_eq!(wide["experts.up.weight"].to_f64(), exact);

    spec.precision.weights = DType::Bf16;
    assert_eq!(
        refusal(&spec, &path),
        "`experts.gate.weight` in FILE is f32, the spec stores it as bf16, which would round its \
         values: set the spec's precision to f32, or allow narrowing"
    );
    let checkpoint = Checkpoint::open(&path).unwrap();
    let narrow = load_canonical(
        &spec,
        &checkpoint,
        LoadOptions {
            narrow: true,
            ..LoadOptions::default()
        },
    )
    .unwrap();
    assert_eq!(narrow["experts.up.weight"].to_f64(), exact);
    assert_eq!(narrow["experts.gate.weight"].dtype, DType::Bf16);
    assert_eq!(narrow["router.weight"].dtype, DType::F32);
}

#[test]
fn errors_name_tensor_and_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w.safetensors");
    let spec = spec(GateLayout::Split);
    let write = |change: &dyn Fn(&mut Tensors<'_>)| {
        let mut weights = numbered(&spec);
        change(&mut weights);
        write_safetensors(&path, &weights).unwrap();
        refusal(&spec, &path)
    };
    assert_eq!(
        write(&|w| w.get_mut("router.weight").unwrap().shape = vec![6, 3]),
        "`router.weight` in FILE has shape [6, 3], expected [3, 6]"
    );
    assert_eq!(
        write(&|w| {
            let tensor = w.remove("router.weight").unwrap();
            w.insert("gate.router.weight".to_string(), tensor);
        }),
        "FILE has no tensor for `router.weight`; it has `gate.router.weight`"
    );
    assert_eq!(
        write(&|w| {
            let tensor = w.remove("router.weight").unwrap();
            w.insert("moe.wg".to_string(), tensor);
        }),
        "FILE has no tensor for `router.weight`; it has `moe.wg`, which the spec does not use"
    );
    assert_eq!(
        write(&|w| w.get_mut("router.weight").unwrap().dtype = DType::I32),
        "`router.weight` in FILE has elements of type i32, expected f32, f16 or bf16"
    );
    let missing = Checkpoint::open(dir.path().join("none"))
        .unwrap_err()
        .to_string();
    assert!(missing.ends_with("none does not exist"), "{missing}");
}

#[test]
fn damaged_files_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w.safetensors");
    write_safetensors(&path, &numbered(&spec(GateLayout::Split))).unwrap();
    let whole = fs::read(&path).unwrap();
    for length in [0, 7, 8, 100, whole.len() / 2, whole.len() - 1] {
        fs::write(&path, &whole[..length]).unwrap();
        let error = Checkpoint::open(&path).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("w.safetensors is damaged: "),
            "{length}: {text}"
        );
        let WeightsError::Corrupt { reason, .. } = error else {
            panic!("{text}");
        };
        assert!(matches!(reason, Damage::CutShort(_)), "{length}: {text}");
    }
    fs::write(
        &path,
        b"PK\x03\x04 this is some other kind of file entirely",
    )
    .unwrap();
    let error = Checkpoint::open(&path).unwrap_err();
    assert!(matches!(error, WeightsError::Corrupt { .. }), "{error}");
}

/// A pipe is refused at once: opening it would wait for a writer.
#[cfg(unix)]
#[test]
fn a_pipe_is_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("model.safetensors");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.unwrap().success());
    let (done, opened) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let files = Checkpoint::files_of(&pipe);
        done.send((files, Checkpoint::open(&pipe))).unwrap();
    });
    let seconds = std::time::Duration::from_secs(20);
    let (_, refused) = opened.recv_timeout(seconds).expect("it waits for a writer");
    let refused = refused.unwrap_err();
    assert!(
        matches!(refused, WeightsError::NotRegular { .. }),
        "{refused}"
    );
}

#[test]
fn shards_and_their_index() {
    let dir = tempfile::tempdir().unwrap();
    let spec = spec(GateLayout::Split);
    let want = numbered(&spec);
    let (mut first, mut second) = (want.clone(), want.clone());
    first.retain(|name, _| name.starts_with("experts"));
    second.retain(|name, _| !name.starts_with("experts"));
    write_safetensors(dir.path().join("a-00001.safetensors"), &first).unwrap();
    write_safetensors(dir.path().join("a-00002.safetensors"), &second).unwrap();
    let index = |second_file: &str| {
        let entry = |name: &String| {
            let file = if first.contains_key(name) {
                "a-00001.safetensors"
            } else {
                second_file
            };
            format!("\"{name}\": \"{file}\"")
        };
        let map: Vec<String> = want.keys().map(entry).collect();
        let text = format!(
            "{{\"metadata\": {{}}, \"weight_map\": {{{}}}}}",
            map.join(",")
        );
        fs::write(dir.path().join("model.safetensors.index.json"), text).unwrap();
    };
    let unindexed = load(&spec, dir.path()).unwrap_err().to_string();
    assert!(
        unindexed
            .contains("it has a-00001.safetensors and 1 more weight file: put the model's index"),
        "{unindexed}"
    );
    index("a-00002.safetensors");
    assert_eq!(load(&spec, dir.path()).unwrap(), want);
    index("a-00001.safetensors");
    let text = load(&spec, dir.path()).unwrap_err().to_string();
    assert!(
        text.contains("a-00001.safetensors is damaged: the index says it has `"),
        "{text}"
    );
    index("../elsewhere.safetensors");
    let text = load(&spec, dir.path()).unwrap_err().to_string();
    assert!(
        text.contains("it names the file `../elsewhere.safetensors` outside"),
        "{text}"
    );
    index("gone.safetensors");
    assert!(matches!(
        load(&spec, dir.path()),
        Err(WeightsError::MissingShard { .. })
    ));
}

#[test]
fn tables_name_existing_experts() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w.safetensors");
    let mut spec = spec(GateLayout::Split);
    spec.router.kind = moesaic_spec::RouterKind::Table;
    spec.router.table_rows = Some(2);
    let mut weights = numbered(&spec);
    let table = |values: [i64; 4]| Tensor::copied(&[2, 2], &values);
    weights.insert("router.table".to_string(), table([2, 0, 1, 2]));
    write_safetensors(&path, &weights).unwrap();
    let loaded = load(&spec, &path).unwrap();
    assert_eq!(
        loaded["router.table"],
        Tensor::copied(&[2, 2], &[2, 0, 1, 2])
    );
    for bad in [3, -1, 1 << 40] {
        weights.insert("router.table".to_string(), table([2, 0, bad, 2]));
        write_safetensors(&path, &weights).unwrap();
        let want = format!("`router.table` in FILE has the value {bad}, expected 0 to 2");
        assert_eq!(refusal(&spec, &path), want);
    }
}

#[test]
fn a_missing_expert_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let config = r#"{"model_type": "mixtral", "hidden_size": 4, "intermediate_size": 3,
                     "num_local_experts": 3, "num_experts_per_tok": 1}"#;
    let import = hf::import(config, 0).unwrap();
    let mut weights = Tensors::new();
    let root = "model.layers.0.block_sparse_moe";
    weights.insert(
        format!("{root}.gate.weight"),
        Tensor::copied(&[3, 4], &[0.0; 12]),
    );
    for e in 0..3 {
        for (leaf, shape) in [("w1", [3, 4]), ("w2", [4, 3]), ("w3", [3, 4])] {
            let name = format!("{root}.experts.{e}.{leaf}.weight");
            weights.insert(name, Tensor::copied(&shape, &[e as f32; 12]));
        }
    }
    let path = dir.path().join("model.safetensors");
    write_safetensors(&path, &weights).unwrap();
    let open = || Checkpoint::open(dir.path()).unwrap();
    let loaded = load_import(&import, &open(), LoadOptions::default()).unwrap();
    assert_eq!(loaded["experts.up.weight"].shape, [3, 3, 4]);
    weights.remove(&format!("{root}.experts.1.w3.weight"));
    write_safetensors(&path, &weights).unwrap();
    let text = load_import(&import, &open(), LoadOptions::default())
        .unwrap_err()
        .to_string();
    let want = "has no tensor for `experts.up.weight`; looked for \
                `model.layers.0.block_sparse_moe.experts.1.w3.weight`";
    assert!(text.ends_with(want), "{text}");
}

#[test]
fn writing_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("y.safetensors");
    let tensor = Tensor::copied::<f32>(&[0, 4], &[]);
    write_safetensors(&path, &Tensors::from([("y".to_string(), tensor)])).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert_eq!(checkpoint.tensor("y").unwrap().shape, [0, 4]);
    let before = fs::read(&path).unwrap();
    let wrong = Tensor {
        dtype: DType::F32,
        shape: vec![2],
        data: vec![0; 7].into(),
    };
    let error = write_safetensors(&path, &Tensors::from([("y".to_string(), wrong)]));
    assert!(matches!(error, Err(WeightsError::Unwritable { .. })));
    assert_eq!(fs::read(&path).unwrap(), before);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    let nowhere = write_safetensors(dir.path().join("no/y"), &Tensors::new());
    assert!(matches!(nowhere, Err(WeightsError::Io { .. })));
}

#[cfg(unix)]
#[test]
fn writing_follows_links_and_replaces_only_files() {
    use std::os::unix::fs::{FileTypeExt, symlink};
    let dir = tempfile::tempdir().unwrap();
    let [file, link, socket] = ["file", "link", "socket"].map(|name| dir.path().join(name));
    fs::write(&file, "old").unwrap();
    symlink("file", &link).unwrap();
    write_whole(&link, b"new").unwrap();
    assert_eq!(fs::read(&file).unwrap(), b"new");
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());

    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    write_whole(&socket, b"new").unwrap_err();
    assert!(
        fs::symlink_metadata(&socket)
            .unwrap()
            .file_type()
            .is_socket()
    );
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
}

/// Writes a safetensors file that consists of this header.
fn header_only(path: &Path, header: &str) {
    let length = (header.len() as u64).to_le_bytes();
    fs::write(path, [&length[..], header.as_bytes()].concat()).unwrap();
}

/// Sizes beside a zero may be huge, because there are no elements.
#[test]
fn huge_sizes_of_empty_tensors_are_a_wrong_shape() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w.safetensors");
    let shape = "[0,9223372036854775808,9223372036854775808]";
    let tensor = format!(r#"{{"dtype":"F32","shape":{shape},"data_offsets":[0,0]}}"#);
    header_only(&path, &format!(r#"{{"router.weight":{tensor}}}"#));
    let said = refusal(&spec(GateLayout::Split), &path);
    assert!(said.contains("[3, 6]"), "{said}");
    // Reordered and fused, as in the layers of models.
    let config = r#"{"model_type": "gpt_oss", "hidden_size": 8, "intermediate_size": 8,
        "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1}"#;
    let import = hf::import(config, 0).unwrap();
    let names = import
        .sources
        .iter()
        .flat_map(|source| &source.alternatives);
    let names: std::collections::BTreeSet<String> = names.flat_map(|a| a.names()).collect();
    let all: Vec<String> = names.iter().map(|n| format!(r#""{n}":{tensor}"#)).collect();
    header_only(&path, &format!("{{{}}}", all.join(",")));
    let file = Checkpoint::open(&path).unwrap();
    let error = load_import(&import, &file, LoadOptions::default()).unwrap_err();
    let WeightsError::Several { errors } = error else {
        panic!("{error}")
    };
    let shapes = |error: &WeightsError| matches!(error, WeightsError::WrongShape { .. });
    assert!(errors.iter().all(shapes), "{errors:?}");
}

/// Nothing is allocated for tensors that the file lacks, which here would be eight terabytes.
#[test]
fn a_spec_larger_than_memory_is_refused_by_a_small_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w.safetensors");
    let mut spec = LayerSpec::from_toml(
        "shape = { model_dim = 32768, hidden_dim = 65535, experts = 1024, top_k = 1 }",
    )
    .unwrap();
    write_safetensors(&path, &numbered(&self::spec(GateLayout::Split))).unwrap();
    let said = refusal(&spec, &path);
    assert!(said.contains("[1024, 32768]"), "{said}");
    // The router fits, the experts do not.
    spec.shape.model_dim = 6;
    spec.shape.experts = 3;
    assert_eq!(spec.validate(), Ok(()));
    let said = refusal(&spec, &path);
    assert!(said.contains("[3, 65535, 6]"), "{said}");
}

#[test]
fn a_note_comes_back_and_leaves_the_tensors_as_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let (path, weights) = (dir.path().join("a"), numbered(&spec(GateLayout::Split)));
    let note = Note {
        key: "ours",
        text: "rank 3",
    };
    write_safetensors_noted(&path, &weights, note).unwrap();
    let file = Checkpoint::open(&path).unwrap();
    assert_eq!(
        (file.noted("ours"), file.noted("theirs")),
        (Some("rank 3"), None)
    );
    assert!(
        weights
            .iter()
            .all(|(name, tensor)| file.read(name).unwrap() == *tensor)
    );
    let bytes = fs::read(&path).unwrap();
    write_safetensors_noted(&path, &weights, note).unwrap();
    assert_eq!(fs::read(&path).unwrap(), bytes);
    write_safetensors(&path, &weights).unwrap();
    assert_eq!(Checkpoint::open(&path).unwrap().noted("ours"), None);
}

#[test]
fn the_files_of_a_checkpoint_are_those_that_opening_reads() {
    let dir = tempfile::tempdir().unwrap();
    let index = r#"{ "weight_map": { "a": "one.safetensors", "b": "../two.safetensors" } }"#;
    fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
    let files = Checkpoint::files_of(dir.path());
    let names: Vec<_> = files.iter().map(|file| file.file_name().unwrap()).collect();
    // The first file does not exist, and would take precedence over the others.
    let expected = [
        "model.safetensors",
        "model.safetensors.index.json",
        "one.safetensors",
    ];
    assert_eq!(names, expected);
    let one = dir.path().join("one.safetensors");
    assert_eq!(Checkpoint::files_of(&one), vec![one]);
}
