//! Reserved loopback ports.

use std::net::{Ipv4Addr, SocketAddr};

use socket2::{Domain, Socket, Type};

/// A free loopback port, reserved until this is dropped.
///
/// A socket is bound to it that never listens. The kernel does not assign such a port to a bind to port 0, but a server that sets
/// `SO_REUSEADDR` (redis-server, std and tokio all do) can bind it by number, also after a restart. While no server listens,
/// connecting to it is refused.
#[derive(Debug)]
pub struct Port {
    addr: SocketAddr,
    _reservation: Socket,
}

impl Port {
    /// Reserves a free port.
    ///
    /// # Panics
    ///
    /// If the loopback interface has no free port.
    pub fn reserve() -> Self {
        let reserve = || {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
            socket.set_reuse_address(true)?;
            socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into())?;
            let addr = socket.local_addr()?.as_socket();
            Ok::<_, std::io::Error>((socket, addr))
        };
        match reserve() {
            Ok((socket, Some(addr))) => Self { addr, _reservation: socket },
            other => panic!("no free port on 127.0.0.1: {other:?}"),
        }
    }

    /// Returns the address, `127.0.0.1` and the port.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Returns the number of the port.
    pub fn number(&self) -> u16 {
        self.addr.port()
    }
}
