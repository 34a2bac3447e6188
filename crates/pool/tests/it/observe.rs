use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use metrics::{SharedString, Unit};
use metrics_util::CompositeKey;
use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use tidewire_pool::{Context, Message, Observed, Overflow, Pool, PoolMetrics, TraceContext};
use tidewire_testkit::{PATIENCE, wait_until};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing_subscriber::layer::{Context as LayerContext, SubscriberExt as _};
use tracing_subscriber::{Layer, Registry};

use crate::gate::Gate;

/// Collects the fields of all spans called `message.handle`.
#[derive(Clone, Default)]
struct Spans(Arc<Mutex<Vec<(Id, Map)>>>);

type Map = HashMap<&'static str, String>;

struct Fields<'a>(&'a mut Map);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0.insert(field.name(), format!("{value:?}").trim_matches('"').to_owned());
    }
}

impl<S: tracing::Subscriber> Layer<S> for Spans {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, _: LayerContext<'_, S>) {
        let mut fields = HashMap::new();
        attributes.record(&mut Fields(&mut fields));
        if attributes.metadata().name() == "message.handle" {
            self.0.lock().unwrap().push((id.clone(), fields));
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, _: LayerContext<'_, S>) {
        let mut spans = self.0.lock().unwrap();
        // Ids are reused, so the newest span is searched.
        if let Some((_, fields)) = spans.iter_mut().rev().find(|(other, _)| other == id) {
            values.record(&mut Fields(fields));
        }
    }
}

impl Spans {
    fn fields(&self) -> Vec<Map> {
        self.0.lock().unwrap().iter().map(|(_, fields)| fields.clone()).collect()
    }
}

#[test]
fn span_is_child_of_the_message_and_parent_of_follow_ups() {
    let spans = Spans::default();
    let handler = |message: &mut Message<u32>, context: &mut Context<'_, u32>| {
        assert_eq!(TraceContext::current(), context.trace());
        match message.payload {
            0 => Err("nothing left"),
            less => {
                // A follow-up without a trace inherits that of the context.
                context.submit(Message::new(8, less - 1).trace(TraceContext::NONE)).map_err(|_| "full")
            }
        }
    };
    let parent: TraceContext = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".parse().unwrap();
    tracing::subscriber::with_default(Registry::default().with(spans.clone()), || {
        let mut pool = Pool::builder().workers(1).simulate(0, Observed::new(handler)).unwrap();
        pool.submit(Message::new(7, 1).trace(parent)).unwrap();
        pool.run(10);
        assert!(TraceContext::current().is_none());
        let letter = pool.dead_letters().take(1).remove(0);
        let out = letter.message.trace.to_string();
        assert!(out.starts_with("00-4bf92f3577b34da6a3ce929d0e0e4736-") && !out.contains("00f067aa0ba902b7"), "{out}");
    });
    let spans = spans.fields();
    let [first, second] = &spans[..] else { panic!("{spans:?}") };
    assert_eq!(first["trace_id"], "4bf92f3577b34da6a3ce929d0e0e4736");
    assert_eq!(first["parent_id"], "00f067aa0ba902b7");
    assert_eq!((first["key"].as_str(), first["status"].as_str()), ("7", "ok"));
    assert_eq!(second["trace_id"], first["trace_id"]);
    assert_eq!(second["parent_id"], first["span_id"]);
    assert_eq!((second["key"].as_str(), second["status"].as_str()), ("8", "error"));
    assert_eq!((first.get("error"), second["error"].as_str()), (None, "nothing left"));
}

#[test]
fn panic_of_an_observer_is_ignored() {
    struct PanickingObserver;
    impl tidewire_pool::Observer for PanickingObserver {
        fn observe(&self, event: tidewire_pool::Event) {
            panic!("injected panic: {event:?}");
        }
    }
    let gate = Gate::opened();
    let pool = Pool::builder().workers(1).observer(Arc::new(PanickingObserver)).start(gate.clone()).unwrap();
    for number in 0..3 {
        pool.submit(Message::new(1, number)).unwrap();
    }
    assert!(pool.drain(PATIENCE).returned.is_empty());
    assert_eq!(gate.handled(), [0, 1, 2]);
}

type Snapshot = Vec<(CompositeKey, Option<Unit>, Option<SharedString>, DebugValue)>;

fn value<'a>(snapshot: &'a Snapshot, name: &str) -> &'a DebugValue {
    let found = snapshot.iter().find(|(key, ..)| key.key().name() == name);
    &found.unwrap_or_else(|| panic!("missing metric {name}")).3
}

#[test]
fn attempts_are_counted_and_timed_including_panics() {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    let handler = |message: &mut Message<u32>, _: &mut Context<'_, u32>| match message.payload {
        0 => Err("injected error"),
        1 => panic!("injected panic"),
        _ => Ok(()),
    };
    let observed = metrics::with_local_recorder(&recorder, || Observed::new(handler));
    let mut pool = Pool::builder().workers(1).simulate(0, observed).unwrap();
    for number in 0..5 {
        pool.submit(Message::new(1, number)).unwrap();
    }
    pool.advance(Duration::from_millis(250));
    pool.run(10);
    let all = snapshotter.snapshot().into_vec();
    assert_eq!(value(&all, "message.handled"), &DebugValue::Counter(3));
    assert_eq!(value(&all, "message.failed"), &DebugValue::Counter(2));
    assert_eq!(value(&all, "message.wait"), &DebugValue::Histogram(vec![0.25.into(); 5]));
    let services = DebugValue::Histogram(vec![0.0.into(); 4]);
    assert_eq!(value(&all, "message.service"), &services, "the service time of a panic is not recorded");
}

#[test]
fn depth_metric_follows_the_pool() {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    let metrics = metrics::with_local_recorder(&recorder, || PoolMetrics::new("test"));
    let gate = Gate::closed();
    let builder = Pool::builder().workers(1).messages(3).overflow(Overflow::DropOldest).observer(Arc::new(metrics));
    let pool = builder.start(gate.clone()).unwrap();
    pool.submit(Message::new(1, 0)).unwrap();
    wait_until("the worker is blocked", PATIENCE, || gate.inside() == 1);
    for number in 1..4 {
        pool.submit(Message::new(1, number)).unwrap();
    }
    let full = snapshotter.snapshot().into_vec();
    assert_eq!(value(&full, "message_pool.depth"), &DebugValue::Gauge(3.0.into()));
    assert_eq!(value(&full, "message_pool.submitted"), &DebugValue::Counter(4));
    assert_eq!(value(&full, "message_pool.dropped"), &DebugValue::Counter(1));
    assert_eq!(value(&full, "message_pool.dead_lettered"), &DebugValue::Counter(1));

    gate.open();
    pool.drain(PATIENCE);
    pool.submit(Message::new(1, 9)).unwrap_err();
    // A snapshot resets the values, so this is the change since the last one.
    let drained = snapshotter.snapshot().into_vec();
    assert_eq!(value(&drained, "message_pool.depth"), &DebugValue::Gauge((-3.0).into()));
    assert_eq!(value(&drained, "message_pool.rejected"), &DebugValue::Counter(1));
}
