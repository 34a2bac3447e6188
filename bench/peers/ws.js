// Answers every message with the first argument. Prints its address.
// The package ws is resolved from the working directory.
const { createRequire } = require('node:module');
const { WebSocketServer } = createRequire(process.cwd() + '/')('ws');

// Encoded in advance, so that only sending is measured.
const reply = Buffer.from(process.argv[2]);
const server = new WebSocketServer({ host: '127.0.0.1', port: 0 });
server.on('connection', (socket) => {
  socket.on('message', () => socket.send(reply, { binary: false }));
});
server.on('listening', () => console.log(`listening on 127.0.0.1:${server.address().port}`));
