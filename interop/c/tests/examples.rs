//! The examples, built by a C compiler from an installed library, give the bits of the Rust face,
//! and neither AddressSanitizer nor valgrind finds anything.

use moesaic::collectives::{Call, threads};
use moesaic::spec::canonical_tensors;
use moesaic::train::replay::{RoutedExperts, TABLE};
use moesaic::{
    DType, Engine, EngineOptions, Input, Layer, LayerOptions, LayerSpec, Mesh, Output, Parallel,
    RngKey, Tensor, Tensors, Training,
};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

const FORWARD: &str = "shape = { model_dim = 32, hidden_dim = 48, experts = 4, top_k = 2 }\n\
                       router = { renormalize = \"sum\" }\n";
const TRAIN: &str = "shape = { model_dim = 32, hidden_dim = 48, experts = 4, top_k = 2 }\n\
                     losses = [{ kind = \"switch\", coefficient = 0.01 }]\n";
const RANKS: &str = "shape = { model_dim = 32, hidden_dim = 48, experts = 4, top_k = 2 }";
const SECOND: &str = "shape = { model_dim = 32, hidden_dim = 48, experts = 4, top_k = 3 }\n\
                      router = { score = \"sigmoid\" }";

/// A folder of these tests.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let (out, err) = (output.stdout, String::from_utf8_lossy(&output.stderr));
    assert!(
        output.status.success(),
        "{command:?}: {}\n{err}",
        output.status
    );
    String::from_utf8(out).unwrap()
}

/// Installs the library, once, and returns the prefix.
fn prefix() -> &'static Path {
    static PREFIX: OnceLock<PathBuf> = OnceLock::new();
    PREFIX.get_or_init(|| {
        let prefix = folder("prefix");
        // Cargo built the libraries beside this test, which depends on them.
        let test = std::env::current_exe().unwrap();
        let built = test.parent().unwrap();
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("install.sh");
        let mut install = Command::new(script);
        run(install.arg(&prefix).env("BUILT", built));
        prefix
    })
}

/// Builds the examples with make in a folder of their own.
fn built(name: &str, settings: &[&str]) -> PathBuf {
    let to = folder(name);
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
    let found = prefix().join("lib/pkgconfig");
    let mut make = Command::new("make");
    make.arg("-C")
        .arg(&to)
        .args(["clean", "all"])
        .args(settings);
    run(make.env("PKG_CONFIG_PATH", found));
    to
}

/// Returns what runs an example on the CPU, with the cache of these tests.
fn started(folder: &Path, name: &str, under: &[&str]) -> Command {
    let program = folder.join(name);
    let mut words: Vec<String> = under.iter().map(|word| word.to_string()).collect();
    words.push(program.display().to_string());
    let mut command = Command::new(&words[0]);
    // AVX2 at most: valgrind knows no AVX-512.
    command.args(&words[1..]).arg(TARGET).arg(cache());
    command
}

fn example(folder: &Path, name: &str, under: &[&str]) -> String {
    run(&mut started(folder, name, under))
}

/// Writes the folder of a model in bf16, once, and returns it.
fn model() -> &'static Path {
    static MODEL: OnceLock<PathBuf> = OnceLock::new();
    MODEL.get_or_init(|| {
        let to = folder("model");
        let config = r#"{ "model_type": "mixtral", "hidden_size": 32, "intermediate_size": 64,
            "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1,
            "torch_dtype": "bfloat16" }"#;
        std::fs::write(to.join("config.json"), config).unwrap();
        std::fs::write(to.join("model.safetensors"), safetensors()).unwrap();
        to
    })
}

/// Returns the file of that model's weights: the size of a JSON header, the header, and waves.
fn safetensors() -> Vec<u8> {
    let block = "model.layers.0.block_sparse_moe";
    let mut shapes = vec![(format!("{block}.gate.weight"), [4, 32])];
    for expert in 0..4 {
        for (name, shape) in [("w1", [64, 32]), ("w2", [32, 64]), ("w3", [64, 32])] {
            shapes.push((format!("{block}.experts.{expert}.{name}.weight"), shape));
        }
    }
    let (mut entries, mut data) = (Vec::new(), Vec::new());
    for (salt, (name, [rows, columns])) in shapes.into_iter().enumerate() {
        let begin = data.len();
        for value in wave(rows * columns, salt) {
            // Multiples of 1/64 below 1/2 lose nothing.
            data.extend(((value.to_bits() >> 16) as u16).to_le_bytes());
        }
        entries.push(format!(
            r#""{name}": {{ "dtype": "BF16", "shape": [{rows}, {columns}], "data_offsets": [{begin}, {}] }}"#,
            data.len()
        ));
    }
    let header = format!("{{ {} }}", entries.join(", "));
    // Readers may want the data at a multiple of 8 bytes.
    let header = format!("{header:<0$}", header.len().next_multiple_of(8));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.into_bytes());
    file.extend(data);
    file
}

fn example_of_a_model(folder: &Path, under: &[&str]) -> String {
    run(started(folder, "model", under).arg(model()))
}

const TARGET: &str = "cpu:avx2";

fn cache() -> PathBuf {
    folder("cache")
}

fn is_there(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}

fn engine() -> Engine {
    let options = EngineOptions {
        store: Some(std::sync::Arc::new(moesaic::Store::open(cache()))),
        threads: Some(2),
        ..EngineOptions::default()
    };
    Engine::open(TARGET, options).unwrap()
}

fn wave(count: usize, salt: usize) -> Vec<f32> {
    let value = |i: usize| ((i * 37 + salt * 11) % 64) as f32 - 32.0;
    (0..count).map(|i| value(i) / 64.0).collect()
}

fn weights(spec: &LayerSpec) -> Tensors<'static> {
    let tensors = canonical_tensors(spec).into_iter().enumerate();
    let tensor = |(i, spec): (usize, moesaic::spec::TensorSpec)| {
        let values = wave(spec.shape.iter().product(), i + 1);
        (spec.name, Tensor::owned(&spec.shape, values))
    };
    tensors.map(tensor).collect()
}

fn bits(name: &str, values: &[f32]) -> String {
    let values: Vec<String> = values
        .iter()
        .map(|v| format!(" {:08x}", v.to_bits()))
        .collect();
    format!("{name}{}\n", values.concat())
}

/// Returns the text that `forward.c` prints, of the Rust face.
fn expected_forward() -> String {
    let spec = LayerSpec::from_toml(FORWARD).unwrap();
    let layer = engine().layer(&spec, &weights(&spec)).unwrap();
    let x = wave(3 * 32, 0);
    let names = ["y", "topk_weights", "topk_ids"];
    let output = layer.forward(Input::new(3, &x).reading(&names)).unwrap();
    let values = |name: &str| output.get(name).unwrap().to_f32();
    let ids: Vec<i32> = output.get("topk_ids").unwrap().to_vec().unwrap();
    let ids: Vec<String> = ids.iter().map(|id| format!(" {id}")).collect();
    format!(
        "{}{}topk_ids{}\nwithout x: tensor `x` is missing: name it in the call, f32 of shape \
         [3, 32]\n",
        bits("y", &values("y")),
        bits("topk_weights", &values("topk_weights")),
        ids.concat(),
    )
}

/// Returns the text that `model.c` prints, of the Rust face.
fn expected_model() -> String {
    let layer = engine().layer_from_hf(model(), 0).unwrap();
    let y = |thread: usize| {
        let x = wave(3 * 32, thread);
        let mut input = Input::new(3, &x);
        input.insert("x", Tensor::rounded(DType::Bf16, &[3, 32], &x));
        let output = layer.forward(&input).unwrap();
        bits("y", &output.get("y").unwrap().to_f32())
    };
    [y(0), y(1)].concat()
}

/// Returns the text that `train.cpp` prints, of the Rust face.
fn expected_train() -> String {
    let spec = LayerSpec::from_toml(TRAIN).unwrap();
    let mut weights = weights(&spec);
    let engine = engine();
    let padded = wave(5 * 40, 0);
    let x: Vec<f32> = padded
        .chunks(40)
        .flat_map(|row| row[..32].to_vec())
        .collect();
    let mut text = String::new();
    for step in 0..3 {
        let layer = engine.training_layer(&spec, &weights, Training::default());
        let layer = layer.unwrap();
        let key = RngKey {
            seed: 7,
            step,
            ..RngKey::default()
        };
        let (output, saved) = layer
            .forward_train(Input::new(5, &x).reading(&["y"]), key)
            .unwrap();
        let y = output.y().to_f32();
        let dx = layer
            .backward(&saved, &Tensor::new(&[5, 32], &y), false)
            .unwrap();
        let gradients = layer.gradients().unwrap();
        if step == 2 {
            text = bits("dx", &dx.get("dx").unwrap().to_f32());
            for (name, gradient) in gradients.iter() {
                text += &bits(name, &gradient.to_f32());
            }
        }
        let stepped = weights.iter().map(|(name, weight)| {
            let old = weight.to_f32().into_iter().zip(gradients[name].to_f32());
            let new: Vec<f32> = old
                .map(|(weight, slope)| weight - 0.001953125 * slope)
                .collect();
            (name.to_string(), Tensor::owned(&weight.shape, new))
        });
        weights = stepped.collect();
    }
    text
}

/// Runs both passes of a layer, whose gradients are added to, and returns `y`.
fn step(layer: &Layer, x: &[f32]) -> Vec<f32> {
    let input = Input::new(3, x);
    let (output, saved) = layer
        .forward_train(input.reading(&["y"]), RngKey::default())
        .unwrap();
    layer.backward(&saved, output.y(), true).unwrap();
    output.y().to_f32()
}

/// Returns the text that `shared.c` prints, of the Rust face.
fn expected_shared() -> String {
    let (engine, x) = (engine(), wave(3 * 32, 0));
    let specs = [RANKS, SECOND].map(|toml| LayerSpec::from_toml(toml).unwrap());
    let weights = weights(&specs[0]);
    let training = Training::default();
    let bank = engine.training_layer(&specs[0], &weights, training);
    let bank = bank.unwrap();
    let layer = engine.layer_over_experts_of(&bank, &specs[1], &weights);
    let layer = layer.unwrap();
    for layer in [&bank, &layer] {
        layer.zero_gradients().unwrap();
    }
    let mut text = bits("bank", &step(&bank, &x));
    text += &bits("layer", &step(&layer, &x));
    let gradient = bank.gradient("experts.down.weight").unwrap();
    text += &bits("gradient", &gradient.to_f32());
    text += &bits("layer", &step(&layer, &x));

    let second = Tensor::owned(&[4, 32], wave(4 * 32, 7));
    let routers = [weights["router.weight"].clone(), second];
    let routers = routers.map(|router| Tensors::from([("router.weight".to_string(), router)]));
    let options = LayerOptions::default().training(training);
    let gates = engine.multi_gate(&specs[0], &weights, &routers, options);
    let gates = gates.unwrap();
    text += "in one pass 1\n";
    let all = |outputs: &[Output], name| -> Vec<f32> {
        let each = outputs.iter();
        each.flat_map(|output| output.get(name).unwrap().to_f32())
            .collect()
    };
    text += &bits("y", &all(&gates.forward(&Input::new(3, &x)).unwrap(), "y"));
    let (outputs, saved) = gates
        .forward_train(&Input::new(3, &x), RngKey::default())
        .unwrap();
    let dy: Vec<Tensor<'_>> = outputs.iter().map(|output| output.y().clone()).collect();
    let back = gates.backward(&saved, &dy, false).unwrap();
    text += &bits("dx", &all(&back, "dx"));
    let gradient = |gate: usize| gates.layers()[gate].gradient("router.weight").unwrap();
    text += &bits("gradient", &gradient(0).to_f32());
    text += &bits("gradient", &gradient(1).to_f32());
    let ids = [1, 0, 1];
    let by_token = gates.forward_by_token(&Input::new(3, &x), &ids).unwrap();
    text += &bits("y by token", &by_token.y().to_f32());
    let run = gates.forward_train_by_token(&Input::new(3, &x), &ids, RngKey::default());
    let (output, saved) = run.unwrap();
    let back = gates.backward_by_token(&saved, output.y(), false).unwrap();
    text += &bits("dx by token", &back.get("dx").unwrap().to_f32());
    text + &bits("gradient", &gradient(1).to_f32())
}

/// Returns the text that `replay.c` prints, of the Rust face.
fn expected_replay() -> String {
    let (engine, spec) = (engine(), LayerSpec::from_toml(RANKS).unwrap());
    let (mut weights, x) = (weights(&spec), wave(5 * 32, 0));
    let chosen = |number: usize| {
        let mut own = weights.clone();
        let router = Tensor::owned(&[4, 32], wave(4 * 32, 20 + number));
        own.insert("router.weight", router);
        let layer = engine.layer(&spec, &own).unwrap();
        let input = Input::new(5, &x);
        let routed = layer.route(input.reading(&["topk_ids"])).unwrap();
        routed.get("topk_ids").unwrap().to_vec().unwrap()
    };
    let record = RoutedExperts::of_layers(5, 2, &[chosen(0), chosen(1)]).unwrap();
    let replay = record.replay(&spec, 1).unwrap();
    weights.insert(TABLE, replay.table);
    let layer = engine.training_layer(&replay.spec, &weights, Training::default());
    let layer = layer.unwrap();
    let places = [4, 0, 2];
    let rows = places.map(|place| &x[place as usize * 32..][..32]).concat();
    let input = Input::new(3, &rows).with_token_ids(&places);
    let run = layer.forward_train(input.reading(&["y", "topk_ids"]), RngKey::default());
    let (output, saved) = run.unwrap();
    layer.backward(&saved, output.y(), false).unwrap();
    let ids: Vec<i32> = output.get("topk_ids").unwrap().to_vec().unwrap();
    let own = record.layer(1).unwrap();
    let wanted = places.map(|place| &own[place as usize * 2..][..2]).concat();
    assert_eq!(ids, wanted);
    let ids: Vec<String> = ids.iter().map(|id| format!(" {id}")).collect();
    let gradient = layer.gradient("router.weight").unwrap().to_f32();
    format!(
        "record of 5 tokens, 2 layers, 2 experts\nexperts{}\n{}{}",
        ids.concat(),
        bits("y", &output.y().to_f32()),
        bits("gradient", &gradient)
    )
}

#[test]
fn forward_is_the_same_bits_shared_and_static() {
    let expected = expected_forward();
    assert_eq!(example(&built("shared", &[]), "forward", &[]), expected);
    let alone = built("static", &["STATIC=1"]);
    assert_eq!(example(&alone, "forward", &[]), expected);
}

#[test]
fn nothing_leaks_and_no_memory_is_misused() {
    let sanitized = "-O1 -g -fsanitize=address";
    let flags = [
        format!("CFLAGS={sanitized}"),
        format!("CXXFLAGS={sanitized}"),
    ];
    let folder = built("sanitized", &[&flags[0], &flags[1]]);
    assert_eq!(example(&folder, "forward", &[]), expected_forward());
    assert_eq!(example_of_a_model(&folder, &[]), expected_model());
    let trained = example(&folder, "train", &[]);
    let (losses, rest) = trained.split_at(trained.find("dx").unwrap());
    assert_eq!(rest, expected_train());
    let losses = losses
        .lines()
        .map(|line| line.strip_prefix("loss ").unwrap().parse());
    let losses: Vec<f64> = losses.collect::<Result<_, _>>().unwrap();
    assert!(losses[0] > losses[1] && losses[1] > losses[2], "{losses:?}");
    assert!(example(&folder, "ranks", &[]).contains("rank 1 of 2"));
    assert_eq!(example(&folder, "shared", &[]), expected_shared());
    assert_eq!(example(&folder, "replay", &[]), expected_replay());
    if !is_there("valgrind") {
        return eprintln!("no valgrind here: only AddressSanitizer has looked");
    }
    let valgrind = [
        "valgrind",
        "--quiet",
        "--error-exitcode=9",
        "--leak-check=full",
        // Possible leaks are the parsed templates of the process, held by inner pointers.
        "--errors-for-leak-kinds=definite",
    ];
    let folder = built("valgrind", &[]);
    assert_eq!(example(&folder, "forward", &valgrind), expected_forward());
    assert_eq!(example_of_a_model(&folder, &valgrind), expected_model());
    assert_eq!(example(&folder, "shared", &valgrind), expected_shared());
    assert_eq!(example(&folder, "replay", &valgrind), expected_replay());
}

#[test]
fn ranks_are_those_of_the_rust_face() {
    let spec = LayerSpec::from_toml(RANKS).unwrap();
    let engine = engine();
    let device = |_| Ok(engine.device().clone());
    let expected = threads::run(2, device, |mut world| {
        let parallel = Parallel {
            ep: 2,
            ..Parallel::default()
        };
        let mesh = Mesh::new(&mut world, parallel).unwrap();
        let options = LayerOptions::over(&mesh).training(Training::default());
        let layer = engine.layer_with(&spec, &weights(&spec), options).unwrap();
        layer
            .set_strategy("overlap_degree=2".parse().unwrap())
            .unwrap();
        let tokens = 3 + mesh.rank();
        let x = wave(tokens * 32, mesh.rank());
        let input = Input::new(tokens, &x);
        let (output, saved) = layer
            .forward_train(input.reading(&["y"]), RngKey::default())
            .unwrap();
        layer.backward(&saved, output.y(), false).unwrap();
        layer.reduce_gradients().unwrap();
        let gradient = layer.gradient("router.weight").unwrap().to_f32();
        let values = (mesh.rank(), output.y().to_f32(), gradient);
        drop((layer, mesh));
        world.finish(&Call::new("end")).unwrap();
        values
    });
    let report = |(rank, y, gradient): (usize, Vec<f32>, Vec<f32>)| {
        let (y, gradient) = (bits("y", &y), bits("gradient", &gradient));
        format!("rank {rank} of 2\n{y}{gradient}")
    };
    let expected = expected.unwrap().into_iter().map(Result::unwrap);
    let expected: String = expected.map(report).collect();
    assert_eq!(example(&built("ranks", &[]), "ranks", &[]), expected);
}

/// As processes of `mpirun` too, whose reports come in any order.
#[test]
fn ranks_of_mpi_are_those_of_threads() {
    if !is_there("mpirun") {
        return eprintln!("no mpirun here: apt-get install openmpi-bin");
    }
    let folder = built("mpi", &[]);
    let mut mpi = Command::new("mpirun");
    mpi.args(["--allow-run-as-root", "--oversubscribe", "-n", "2"]);
    mpi.arg(folder.join("ranks"))
        .args([TARGET.as_ref(), cache().as_os_str()]);
    let (found, wanted) = (run(mpi.arg("mpi")), example(&folder, "ranks", &[]));
    let (first, second) = wanted.split_at(wanted.find("rank 1").unwrap());
    assert!(
        found == wanted || found == format!("{second}{first}"),
        "{found}"
    );
}

#[test]
fn clang_builds_the_examples() {
    if !is_there("clang++") {
        return eprintln!("no clang here: apt-get install clang");
    }
    let folder = built("clang", &["CC=clang", "CXX=clang++"]);
    assert_eq!(example(&folder, "forward", &[]), expected_forward());
    assert_eq!(example(&folder, "shared", &[]), expected_shared());
    let trained = example(&folder, "train", &[]);
    assert!(trained.ends_with(&expected_train()), "{trained}");
}

/// The example of docs/C.md, as it stands there.
#[test]
fn the_example_of_the_page_runs() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/C.md");
    let page = std::fs::read_to_string(page).unwrap();
    let code = page
        .split("```c\n")
        .nth(1)
        .unwrap()
        .split("```")
        .next()
        .unwrap();
    let folder = folder("page");
    std::fs::write(folder.join("page.c"), code).unwrap();
    let (include, lib) = (prefix().join("include"), prefix().join("lib"));
    let mut cc = Command::new("cc");
    cc.current_dir(&folder)
        .args(["page.c", "-o", "page", "-Wall", "-Wextra", "-Werror"]);
    cc.arg(format!("-I{}", include.display()))
        .arg(format!("-L{}", lib.display()));
    run(cc
        .arg("-lmoesaic")
        .arg(format!("-Wl,-rpath,{}", lib.display())));
    let printed = run(&mut Command::new(folder.join("page")));
    assert!(printed.trim().parse::<f32>().unwrap() > 0.0, "{printed}");
}

#[test]
fn cmake_finds_the_package() {
    if !is_there("cmake") {
        return eprintln!("no cmake here: pip install cmake");
    }
    let (build, source) = (
        folder("cmake"),
        Path::new(env!("CARGO_MANIFEST_DIR")).join("examples"),
    );
    let mut configure = Command::new("cmake");
    configure.arg("-S").arg(source).arg("-B").arg(&build);
    run(configure.arg(format!("-DCMAKE_PREFIX_PATH={}", prefix().display())));
    run(Command::new("cmake").arg("--build").arg(&build));
    for name in ["forward", "forward_static"] {
        assert_eq!(example(&build, name, &[]), expected_forward());
    }
}
