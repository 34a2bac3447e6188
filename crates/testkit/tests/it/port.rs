use std::collections::HashSet;
use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};

use tidewire_testkit::{PATIENCE, Port, wait_until};

#[test]
fn a_reserved_port_refuses_until_a_server_binds_it() {
    let port = Port::reserve();
    assert_eq!(TcpStream::connect(port.addr()).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    for _ in 0..3 {
        // The listener before may live on in a child that another test has forked and that has yet to exec.
        let mut listener = None;
        wait_until("the port is bound", PATIENCE, || {
            listener = TcpListener::bind(port.addr()).ok();
            listener.is_some()
        });
        let listener = listener.unwrap();
        let _client = TcpStream::connect(port.addr()).unwrap();
        let _served = listener.accept().unwrap();
    }
}

#[test]
fn a_reserved_port_is_not_assigned_to_others() {
    let reserved: Vec<Port> = (0..500).map(|_| Port::reserve()).collect();
    let numbers: HashSet<u16> = reserved.iter().map(Port::number).collect();
    assert_eq!(numbers.len(), reserved.len());

    let others: Vec<TcpListener> = (0..500).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    assert!(others.iter().all(|other| !numbers.contains(&other.local_addr().unwrap().port())));

    let clients: Vec<TcpStream> =
        others.iter().map(|other| TcpStream::connect(other.local_addr().unwrap()).unwrap()).collect();
    assert!(clients.iter().all(|client| !numbers.contains(&client.local_addr().unwrap().port())));
}
