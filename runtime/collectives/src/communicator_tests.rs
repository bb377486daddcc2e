use super::*;
use crate::SetupError;
use moesaic_cpu::CpuDevice;

/// An operation that another thread begins while the world is closing must not wait forever.
#[test]
fn an_operation_begun_while_the_world_is_closed_ends() {
    let device = Arc::new(CpuDevice::with_threads(1).unwrap());
    let mut transports = crate::threads::world(2).into_iter();
    let (own, _other) = (transports.next().unwrap(), transports.next().unwrap());
    let mut world = Communicator::new(Box::new(own), device);
    let barrier = world.barrier(&Call::new("late")).unwrap();
    let error = world.core.lock().close().unwrap_err().to_string();
    assert!(error.contains("was begun meanwhile"), "{error}");
    let error = barrier.wait().unwrap_err().to_string();
    assert!(error.contains("was begun meanwhile"), "{error}");
    assert!(world.barrier(&Call::new("after")).is_err());
}

/// A rank that makes no call still sends, and the progress thread ends with its last holder.
#[test]
fn operations_go_on_between_calls() {
    let ranks = crate::threads::run(
        2,
        |_| Ok(Arc::new(CpuDevice::with_threads(1).unwrap()) as Arc<dyn Device>),
        |mut world| {
            let elements = 1 << 16;
            let buffer = |value: u8| {
                let buffer = Arc::new(world.device.alloc(elements).unwrap());
                let bytes = vec![value; elements];
                world.device.upload(&bytes, &buffer, 0).unwrap();
                Slice::whole(&buffer, crate::CommElement::U8)
            };
            let peer = 1 - world.rank();
            let (sent, received) = (buffer(world.rank() as u8), buffer(9));
            let progress_thread = world.progress_thread().unwrap();
            assert!(Arc::ptr_eq(
                &progress_thread,
                &world.progress_thread().unwrap()
            ));
            let to = |slice: &Slice| Transfer {
                peer,
                slice: slice.clone(),
            };
            let call = Call::new("rows");
            let exchange = world.exchange(&[to(&sent)], &[to(&received)], &call);
            let until = Instant::now() + Duration::from_secs(40);
            while world.core.lock().is_busy() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
            let before = Instant::now();
            assert!(exchange.unwrap().wait_timed().unwrap() <= before);
            let mut bytes = vec![0; elements];
            let buffer = received.buffer();
            world.device.download(buffer, 0, &mut bytes).unwrap();
            assert!(bytes.iter().all(|byte| *byte == peer as u8));
            drop(progress_thread);
            assert!(world.core.lock().progress_thread().is_none());
            world.finish(&Call::new("end")).unwrap();
        },
    );
    for rank in ranks.unwrap() {
        rank.unwrap();
    }
}

/// The same, where the failure is older than the operation.
#[test]
fn an_operation_after_the_end_has_its_deadline() {
    let device = Arc::new(CpuDevice::with_threads(1).unwrap());
    let mut transports = crate::threads::world(2).into_iter();
    let (own, _other) = (transports.next().unwrap(), transports.next().unwrap());
    let mut world = Communicator::new(Box::new(own), device);
    let call = Call::new("late").within(Duration::from_millis(1));
    let barrier = world.barrier(&call).unwrap();
    world
        .core
        .lock()
        .fail_before(CollectiveError::setup(SetupError::Finished));
    let error = barrier.wait().unwrap_err();
    assert!(matches!(error, CollectiveError::Deadline { .. }), "{error}");
}
