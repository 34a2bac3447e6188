use tidewire_pool::{TraceContext, TraceError};

#[test]
fn hostile_headers_are_refused() {
    for header in [
        "",
        "-",
        "00",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-1",
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-extra",
        "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "00-+bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e473é-00f067aa0ba902b7-01",
    ] {
        assert_eq!(header.parse::<TraceContext>(), Err(TraceError::Malformed), "{header}");
    }
    for header in [
        "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
    ] {
        assert_eq!(header.parse::<TraceContext>(), Err(TraceError::Zero));
    }
}

#[test]
fn a_later_version_is_understood_as_far_as_known() {
    let later = "cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-what.else".parse::<TraceContext>().unwrap();
    assert_eq!(later.trace_id(), 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736);
    assert_eq!(later.span_id(), 0x00f0_67aa_0ba9_02b7);
    assert!(later.is_sampled());
}

#[test]
fn children_of_none_are_none() {
    assert!(TraceContext::NONE.child().is_none());
    assert!(TraceContext::current().is_none());
    let root = TraceContext::root();
    assert_ne!(root, TraceContext::root());
    assert_eq!(root.to_string().parse(), Ok(root));
}
