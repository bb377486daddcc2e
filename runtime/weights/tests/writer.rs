//! Files that are written a few bytes at a time.

use moesaic_kernel::DType;
use moesaic_tensor::{Described, WeightSink};
use moesaic_weights::{Checkpoint, Writer};
use std::path::Path;

fn tensors(count: usize) -> Vec<Described> {
    let tensor = |number: usize| Described {
        name: format!("tensor{number}"),
        dtype: DType::Bf16,
        shape: vec![number + 1, 3],
    };
    (0..count).map(tensor).collect()
}

fn bytes(tensor: usize) -> Vec<u8> {
    vec![tensor as u8 + 1; 6 * (tensor + 1)]
}

/// Writes pieces that do not end where tensors do.
fn fill(writer: &mut Writer, count: usize) {
    writer.begin(&tensors(count)).unwrap();
    let all: Vec<u8> = (0..count).flat_map(bytes).collect();
    all.chunks(7).for_each(|piece| writer.write(piece).unwrap());
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap().flatten();
    let mut names: Vec<_> = entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

fn check(path: &Path, count: usize) {
    let checkpoint = Checkpoint::open(path).unwrap();
    assert_eq!(checkpoint.names().count(), count);
    for number in 0..count {
        let tensor = checkpoint.tensor(&format!("tensor{number}")).unwrap();
        assert_eq!(tensor.shape, [number + 1, 3]);
        assert_eq!(tensor.bytes, bytes(number));
    }
}

#[test]
fn files_are_bounded_and_an_index_names_them() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = Writer::directory(folder.path(), 40);
    fill(&mut writer, 4); // of 6, 12, 18 and 24 bytes
    assert!(Checkpoint::open(folder.path()).is_err(), "not yet");
    writer.end().unwrap();
    check(folder.path(), 4);
    let index = "model.safetensors.index.json".to_string();
    let file = |n| format!("model-0000{n}-of-00002.safetensors");
    assert_eq!(names(folder.path()), [file(1), file(2), index]);
    // A later checkpoint in the same place is the one that is read, in either form.
    let mut writer = Writer::directory(folder.path(), 1000);
    fill(&mut writer, 3);
    writer.end().unwrap();
    check(folder.path(), 3);
    let mut writer = Writer::directory(folder.path(), 1);
    fill(&mut writer, 2);
    writer.end().unwrap();
    check(folder.path(), 2);
}

#[test]
fn what_was_not_finished_is_not_there() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("layer.safetensors");
    let mut writer = Writer::file(&path);
    fill(&mut writer, 2);
    writer.end().unwrap();
    check(&path, 2);
    let mut writer = Writer::file(&path);
    writer.begin(&tensors(3)).unwrap();
    writer.write(&bytes(0)).unwrap();
    let error = writer.end().unwrap_err().to_string();
    assert!(error.contains("30 bytes"), "{error}");
    drop(writer);
    check(&path, 2);
    let mut writer = Writer::file(&path);
    fill(&mut writer, 3);
    assert!(writer.write(&[0]).is_err(), "more than was said");
    drop(writer);
    check(&path, 2);
    assert_eq!(names(folder.path()), ["layer.safetensors"]);
}
