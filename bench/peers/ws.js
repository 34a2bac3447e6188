// Answers every message with the same reply, which is the first argument. Prints where it listens.
// The package is looked for from the folder in which this is run.
const { createRequire } = require('node:module');
const { WebSocketServer } = createRequire(process.cwd() + '/')('ws');

// Made before, so that answering is all there is to do.
const reply = Buffer.from(process.argv[2]);
const server = new WebSocketServer({ host: '127.0.0.1', port: 0 });
server.on('connection', (socket) => {
  socket.on('message', () => socket.send(reply, { binary: false }));
});
server.on('listening', () => console.log(`listening on 127.0.0.1:${server.address().port}`));
