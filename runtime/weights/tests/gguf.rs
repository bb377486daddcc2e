//! Handmade GGUF files: shards, fused tensors, alignments, and invalid headers.

use moesaic_spec::gguf::{GgufError, import, moe_layers};
use moesaic_tensor::Tensors;
use moesaic_weights::{Checkpoint, Damage, LoadOptions, WeightsError, load_import};
use std::fs;
use std::path::Path;

/// A file under construction.
#[derive(Clone, Default)]
struct File {
    keys: Vec<(String, u32, Vec<u8>)>,
    /// Name, sizes (innermost first), ggml's type and bytes of each tensor.
    tensors: Vec<(String, Vec<u64>, u32, Vec<u8>)>,
    alignment: Option<u32>,
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

impl File {
    fn number(&mut self, key: &str, value: u32) {
        let value = value.to_le_bytes().to_vec();
        self.keys.push((key.to_string(), 4, value));
    }

    /// Adds an f32 tensor whose numbers count from `first`.
    fn counted(&mut self, name: &str, sizes: &[u64], first: usize) {
        let count = sizes.iter().product::<u64>() as usize;
        let numbers = (first..first + count).flat_map(|n| (n as f32).to_le_bytes());
        let name = format!("blk.0.{name}");
        self.tensors
            .push((name, sizes.to_vec(), 0, numbers.collect()));
    }

    fn write(&self, path: &Path) {
        let mut keys = self.keys.clone();
        if let Some(size) = self.alignment {
            let size = size.to_le_bytes().to_vec();
            keys.push(("general.alignment".to_string(), 4, size));
        }
        let alignment = self.alignment.unwrap_or(32) as usize;
        let mut bytes = [b"GGUF", &3u32.to_le_bytes()[..]].concat();
        for count in [self.tensors.len(), keys.len()] {
            bytes.extend((count as u64).to_le_bytes());
        }
        for (key, kind, value) in keys {
            bytes.extend([text(&key), kind.to_le_bytes().to_vec(), value].concat());
        }
        let mut data: Vec<u8> = Vec::new();
        for (name, sizes, kind, numbers) in &self.tensors {
            bytes.extend(text(name));
            bytes.extend((sizes.len() as u32).to_le_bytes());
            bytes.extend(sizes.iter().flat_map(|size| size.to_le_bytes()));
            bytes.extend(kind.to_le_bytes());
            bytes.extend((data.len() as u64).to_le_bytes());
            data.extend(numbers);
            data.resize(data.len().next_multiple_of(alignment), 0);
        }
        bytes.resize(bytes.len().next_multiple_of(alignment), 0);
        bytes.extend(data);
        fs::write(path, bytes).unwrap();
    }
}

/// Returns a layer of Qwen2 with width 4, experts 2 wide and a shared expert 3 wide.
fn qwen2() -> File {
    let mut file = File::default();
    let name = "general.architecture".to_string();
    file.keys.push((name, 8, text("qwen2moe")));
    file.number("qwen2moe.embedding_length", 4);
    file.number("qwen2moe.expert_count", 2);
    file.number("qwen2moe.expert_used_count", 1);
    file.counted("ffn_gate_inp.weight", &[4, 2], 0);
    file.counted("ffn_gate_exps.weight", &[4, 2, 2], 100);
    file.counted("ffn_up_exps.weight", &[4, 2, 2], 200);
    file.counted("ffn_down_exps.weight", &[2, 4, 2], 300);
    file.counted("ffn_gate_inp_shexp.weight", &[4], 400);
    file.counted("ffn_gate_shexp.weight", &[4, 3], 500);
    file.counted("ffn_up_shexp.weight", &[4, 3], 600);
    file.counted("ffn_down_shexp.weight", &[3, 4], 700);
    file
}

fn load(path: &Path) -> Tensors<'static> {
    let checkpoint = Checkpoint::open(path).unwrap();
    let metadata = checkpoint.gguf().expect("a GGUF file");
    assert_eq!(moe_layers(metadata).unwrap(), [0]);
    let import = import(metadata, 0).unwrap();
    load_import(&import, &checkpoint, LoadOptions::default()).unwrap()
}

#[test]
fn shards_fused_halves_and_alignments_change_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (file, path) = (qwen2(), dir.path().join("one.gguf"));
    file.write(&path);
    let whole = load(&path);
    assert_eq!(whole["experts.up.weight"].shape, [2, 2, 4]);
    assert_eq!(whole["experts.up.weight"].to_f32()[8], 208.0);
    assert_eq!(
        whole["shared.0.router.weight"].to_f32(),
        [400., 401., 402., 403.]
    );
    assert_eq!(load(dir.path()), whole, "the one model of a directory");

    let mut fused = file.clone();
    let up = fused.tensors.remove(2);
    let gate = &mut fused.tensors[1];
    gate.0 = "blk.0.ffn_gate_up_exps.weight".to_string();
    gate.1 = vec![4, 4, 2];
    let halves = gate.3.chunks(32).zip(up.3.chunks(32));
    gate.3 = halves.flat_map(|(gate, up)| [gate, up].concat()).collect();
    fused.alignment = Some(256);
    // A new path, because the old file is still mapped.
    let path = dir.path().join("fused.gguf");
    fused.write(&path);
    assert_eq!(load(&path), whole);

    let shards = tempfile::tempdir().unwrap();
    let name = |number: usize| shards.path().join(format!("m-{number:05}-of-00002.gguf"));
    let (mut first, mut second) = (file.clone(), File::default());
    second.tensors = first.tensors.split_off(3);
    first.number("split.count", 2);
    second.number("split.count", 2);
    first.write(&name(1));
    let missing = Checkpoint::open(name(1)).unwrap_err();
    assert!(
        matches!(missing, WeightsError::NotFound { .. }),
        "{missing}"
    );
    second.write(&name(2));
    for path in [name(1), name(2), shards.path().to_path_buf()] {
        assert_eq!(load(&path), whole);
    }
    let third = shards.path().join("m-00001-of-00003.gguf");
    for (number, file) in [(1, &first), (2, &second), (3, &File::default())] {
        file.write(&shards.path().join(format!("m-{number:05}-of-00003.gguf")));
    }
    let said = Checkpoint::open(&third).unwrap_err().to_string();
    assert!(said.contains("it is one of 2 shards"), "{said}");
    second.number("split.no", 0);
    second.write(&name(2));
    let said = Checkpoint::open(name(1)).unwrap_err().to_string();
    assert!(said.contains("by its key `split.no` shard 1"), "{said}");
    let alone = shards.path().join("alone.gguf");
    first.write(&alone);
    let said = Checkpoint::open(&alone).unwrap_err().to_string();
    assert!(said.contains("it is one of 2 shards"), "{said}");
}

#[test]
fn what_no_recipe_reads_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.gguf");
    let refused = |file: &File| -> GgufError {
        file.write(&path);
        import(Checkpoint::open(&path).unwrap().gguf().unwrap(), 0).unwrap_err()
    };
    let mut biased = qwen2();
    biased.counted("ffn_up_exps.bias", &[2, 2], 0);
    let said = refused(&biased).to_string();
    assert!(said.contains("`blk.0.ffn_up_exps.bias`"), "{said}");
    let mut other = qwen2();
    other.keys[0].2 = text("phimoe");
    let said = refused(&other).to_string();
    assert!(said.starts_with("architecture `phimoe` is not supported; supported are dbrx, "));
    let mut unread = qwen2();
    unread.tensors[1].2 = 16;
    unread.write(&path);
    let checkpoint = Checkpoint::open(&path).unwrap();
    let import = import(checkpoint.gguf().unwrap(), 0).unwrap();
    let said = load_import(&import, &checkpoint, LoadOptions::default()).unwrap_err();
    assert!(
        said.to_string()
            .contains("elements of type IQ2_XXS, expected F32, F16"),
        "{said}"
    );
}

/// A file truncated anywhere is refused, and so are impossible sizes.
#[test]
fn headers_that_lie_are_one_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.gguf");
    qwen2().write(&path);
    let whole = fs::read(&path).unwrap();
    // Missing padding after the last tensor does no harm, since it is not part of a tensor.
    for length in (4..whole.len() - 32).step_by(7) {
        fs::write(&path, &whole[..length]).unwrap();
        let error = Checkpoint::open(&path).unwrap_err();
        let WeightsError::Corrupt { reason, .. } = &error else {
            panic!("{error}");
        };
        assert!(matches!(reason, Damage::CutShort(_)), "{error}");
    }
    let mut endless = qwen2();
    endless.tensors[1].1 = vec![1 << 40, 1 << 40];
    endless.write(&path);
    let said = Checkpoint::open(&path).unwrap_err().to_string();
    assert!(said.contains("more than there can be"), "{said}");
    let mut twice = qwen2();
    twice.number("qwen2moe.expert_used_count", 2);
    twice.write(&path);
    let said = Checkpoint::open(&path).unwrap_err().to_string();
    assert!(
        said.contains("`qwen2moe.expert_used_count` twice"),
        "{said}"
    );
    // The router's size is 32 bytes, and the next tensor begins where it ends.
    let mut bytes = whole.clone();
    let name = b"blk.0.ffn_gate_exps.weight";
    let at = bytes.windows(name.len()).position(|at| at == name).unwrap();
    let offset = at + name.len() + 4 + 3 * 8 + 4;
    assert_eq!(bytes[offset], 32);
    bytes[offset] = 0;
    fs::write(&path, bytes).unwrap();
    let said = Checkpoint::open(&path).unwrap_err().to_string();
    assert!(said.contains("share bytes"), "{said}");
    let mut torn = qwen2();
    torn.tensors[1].2 = 2;
    torn.write(&path);
    let said = Checkpoint::open(&path).unwrap_err().to_string();
    assert!(said.contains("no whole blocks of Q4_0"), "{said}");
}
