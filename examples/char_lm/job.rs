//! `--ranks N`, or `mpirun -n N`: the model with its experts on many ranks.

use super::common::experts::spec;
use super::common::mesh_experts::MeshExperts;
use super::model::Model;
use super::ranks::RankLearner;
use super::run::Pace;
use super::text::Text;
use super::{EXPERTS, HIDDEN, LAYERS, SHAPE, TOP_K, batches, last_gain};
use moesaic::collectives::{Call, Communicator, World, mpi, threads};
use moesaic::reference::Random;
use moesaic::{Engine, Mesh, Parallel};
use std::error::Error;
use std::path::PathBuf;
use std::time::Instant;

/// The result of a rank. Errors of threads go to the thread that started them.
type Ended = Result<(), Box<dyn Error + Send + Sync>>;

/// The options of a run over ranks.
#[derive(Clone, Default)]
pub struct Job {
    /// The number of threads of this process. Processes that a launcher has started are ranks by
    /// themselves.
    pub ranks: Option<usize>,
    /// The division of the experts; by default as many expert-parallel ranks as possible.
    pub mesh: Option<Parallel>,
    /// The path for model and optimizer, saved at the end and every `every` steps.
    pub save: Option<PathBuf>,
    /// The steps between two saves.
    pub every: Option<usize>,
    /// The checkpoint to continue from.
    pub resume: Option<PathBuf>,
    /// The step to stop after, as if the run had been interrupted.
    pub until: Option<usize>,
}

/// Reads `ep=2,dp=2`; sizes without a name are 1.
pub fn mesh(text: &str) -> Result<Parallel, String> {
    let mut mesh = Parallel::default();
    for part in text.split(',') {
        let (name, number) = part.split_once('=').unwrap_or((part, ""));
        let number = number
            .parse()
            .map_err(|_| format!("`{part}` is not as ep=2"))?;
        match name {
            "ep" => mesh.ep = number,
            "shards" => mesh.expert_tp = number,
            "dp" => mesh.dp = number,
            _ => return Err(format!("`{name}` is none of ep, shards, dp")),
        }
    }
    Ok(mesh)
}

impl Job {
    /// Returns true if this process is a rank, or is to start ranks.
    pub fn wanted(&self) -> Result<bool, Box<dyn Error>> {
        let launched = World::from_environment()?.is_some_and(|world| world.size > 1);
        Ok(launched || self.ranks.is_some() || self.mesh.is_some())
    }

    /// Trains on all ranks; the first one prints.
    pub fn run(&self, text: &Text, pace: &Pace) -> Result<(), Box<dyn Error>> {
        let engine = Engine::cpu()?;
        let device = engine.device();
        let launched = World::from_environment()?.filter(|world| world.size > 1);
        if launched.is_some() {
            let world = mpi::start(&mpi::MpiOptions::default(), device.clone())?;
            return local(self.rank(world, &engine, text, pace));
        }
        let count = self
            .ranks
            .or(self.mesh.map(|mesh| mesh.ranks()))
            .unwrap_or(1);
        let body = |world| self.rank(world, &engine, text, pace);
        for rank in threads::run(count, |_| Ok(device.clone()), body)? {
            local(rank.map_err(|_| "a rank has panicked")?)?;
        }
        Ok(())
    }

    fn rank(&self, mut world: Communicator, engine: &Engine, text: &Text, pace: &Pace) -> Ended {
        let spec = spec(SHAPE.width, HIDDEN, EXPERTS, TOP_K);
        let parallel = self
            .mesh
            .unwrap_or_else(|| Parallel::of(world_size(&world), &spec));
        let mesh = Mesh::new(&mut world, parallel)?;
        let mut random = Random::new(3);
        let layers: Result<Vec<MeshExperts>, _> = (0..LAYERS)
            .map(|_| MeshExperts::new(engine, &mesh, &spec, last_gain(), &mut random))
            .collect();
        let model = Model::new(text.vocabulary, SHAPE, layers?, 1);
        let mut learner = RankLearner::new(model, &engine.ranks(&mesh), pace, SHAPE.context);
        self.learn(&mut learner, text, pace, &mesh)
            .map_err(|error| error.to_string())?;
        world.finish(&Call::new("end"))?;
        Ok(())
    }

    fn learn(
        &self,
        learner: &mut RankLearner,
        text: &Text,
        pace: &Pace,
        mesh: &Mesh,
    ) -> Result<(), Box<dyn Error>> {
        let says = |line: &str| {
            if mesh.rank() == 0 {
                println!("{line}");
            }
        };
        let Parallel {
            ep,
            expert_tp: shards,
            dp,
            ..
        } = mesh.parallel();
        says(&format!(
            "{EXPERTS} experts on a mesh of ep {ep} x shards {shards} x dp {dp}"
        ));
        says("  step  training  held out  seconds so far");
        if let Some(file) = &self.resume {
            learner.resume(file)?;
        }
        let (start, mut sum, mut since) = (Instant::now(), 0.0, 0);
        let until = self.until.unwrap_or(pace.steps).min(pace.steps);
        while learner.steps() < until {
            let step = learner.steps() + 1;
            sum += learner.step(&text.batch(pace.sequences, SHAPE.context, &mut batches(step)))?;
            since += 1;
            if step.is_multiple_of(pace.report) {
                let held_out = text.held_out(pace.held_out, SHAPE.context);
                let (training, held_out) = (sum / since as f64, learner.held_out(&held_out)?);
                let seconds = start.elapsed().as_secs_f64();
                says(&format!(
                    "{step:6} {training:9.4} {held_out:9.4} {seconds:15.1}"
                ));
                (sum, since) = (0.0, 0);
            }
            let now = step == until || self.every.is_some_and(|every| step.is_multiple_of(every));
            if let Some(file) = self.save.as_ref().filter(|_| now) {
                learner.save(file)?;
            }
        }
        Ok(())
    }
}

/// Returns the error in this thread's own type.
fn local(ended: Ended) -> Result<(), Box<dyn Error>> {
    ended.map_err(|error| -> Box<dyn Error> { error })
}

fn world_size(world: &Communicator) -> usize {
    moesaic::collectives::Collectives::size(world)
}
