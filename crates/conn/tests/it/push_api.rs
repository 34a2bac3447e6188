//! Uses every item of the push API with its type, so that a change breaks the build.

use std::io;
use std::time::Duration;

use tidewire_conn::{
    ConnectionContext, ConnectionId, FairnessConfig, FrameLike, Protocol, PushError, PushHandle, PushPolicy,
    PushPriority, PushQueues, SessionRegistry, Supervisor,
};
use tokio::sync::mpsc;

struct Packet;

impl FrameLike for Packet {
    fn size(&self) -> usize {
        1
    }
}

fn is_clone_send_sync<T: Clone + Send + Sync + 'static>() {}

async fn handle(handle: PushHandle<Packet>) -> Result<(), PushError> {
    let high: Result<(), PushError> = handle.push_high_priority(Packet).await;
    high?;
    let low: Result<(), PushError> = handle.push_low_priority(Packet).await;
    low?;
    for policy in [PushPolicy::ReturnErrorIfFull, PushPolicy::DropIfFull, PushPolicy::WarnAndDropIfFull] {
        let pushed: Result<(), PushError> = handle.try_push(Packet, PushPriority::Low, policy);
        pushed?;
    }
    Ok(())
}

fn registry(registry: &SessionRegistry<Packet>, id: ConnectionId, handle: &PushHandle<Packet>) {
    registry.insert(id, handle);
    let _: Option<PushHandle<Packet>> = registry.get(&id);
    registry.remove(&id);
}

fn settings<P: Protocol>(protocol: P, dead_letters: mpsc::Sender<P::Frame>) -> Supervisor<P> {
    let fairness = FairnessConfig::default().max_high_before_low(16).time_slice(Duration::from_micros(100));
    Supervisor::builder(protocol).fairness(fairness).dead_letters(dead_letters).build()
}

fn hooks<P: Protocol>(
    protocol: &P,
    handle: PushHandle<P::Frame>,
    frame: &mut P::Frame,
    context: &mut ConnectionContext<P::Frame>,
) {
    protocol.on_connection_setup(handle, context);
    protocol.before_send(frame, context);
    protocol.on_command_end(context);
}

#[tokio::test]
async fn push_api_is_complete() {
    is_clone_send_sync::<PushHandle<Packet>>();
    let _ = (settings::<crate::test_server::Words>, hooks::<crate::test_server::Words>);

    let (mut queues, pusher): (PushQueues<Packet>, PushHandle<Packet>) = PushQueues::bounded(8, 8);
    registry(&SessionRegistry::default(), ConnectionId(1), &pusher);
    handle(pusher).await.unwrap();
    let received: Option<(PushPriority, Packet)> = queues.recv().await;
    assert!(matches!(received, Some((PushPriority::High, Packet))));

    let broken: io::Error = PushError::Closed.into();
    assert_eq!(broken.kind(), io::ErrorKind::BrokenPipe);
    assert_ne!(PushError::QueueFull, PushError::Closed);
}
